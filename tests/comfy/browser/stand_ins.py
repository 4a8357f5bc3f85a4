"""Tiny files under the official names, so that a workflow can be loaded and rendered on any machine.

What is real in such a render: ComfyUI's server, frontend, loaders, LoRA loader, samplers, guiders, video nodes and our
node, and models of the right classes (Wan2.2 T2V and I2V, HunyuanVideo 1.5, MiniMax-H3) with two small random blocks.
What is not: text encoders and VAEs. Their files are empty and their loaders are replaced in the prompt by the test
nodes ``TestTextEncoder`` and ``TestVAE``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from .. import checkpoints

KINDS = {"wan2.2_t2v": "wan", "wan2.2_i2v": "wan_i2v", "hunyuanvideo1.5": "hv15", "minimax_h3_fl2va": "h3"}
# Wan2.2's and MiniMax-H3's attention layers by name: a LoRA of rank 1 for each.
LORA_LAYERS = {"wan2.2": "blocks.{}.self_attn.q", "minimax_h3": "blocks.{}.attn.qkv_proj"}
TEXT_CHANNELS = {"wan": 4096, "hunyuan_video_15": 3584, "minimax": 5120}


def write_models(files: list[dict], models: Path, made: Path) -> None:
    """Tiny diffusion models and LoRAs, and empty files for the rest. ``made`` keeps one tiny model of each kind."""
    for file in files:
        path = models / file["directory"] / file["name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            continue
        if file["directory"] == "diffusion_models":
            kind = next(kind for prefix, kind in KINDS.items() if file["name"].startswith(prefix))
            path.hardlink_to(made / checkpoints.build(kind, made))
        elif file["directory"] == "loras":
            _write_lora(path, made)
        else:
            path.touch()


def write_names(files: list[dict], models: Path) -> None:
    """Empty files only: enough for the frontend to offer the names."""
    for file in files:
        path = models / file["directory"] / file["name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def copy_example_image(comfyui: Path, base: Path) -> None:
    """The picture that lies in every ComfyUI's input folder, and that the image workflow starts from."""
    shutil.copy2(comfyui / "input" / "example.png", base / "input" / "example.png")


def _write_lora(path: Path, made: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    prefix = next(prefix for prefix in LORA_LAYERS if path.name.startswith(prefix))
    kind = "wan" if prefix == "wan2.2" else "h3"
    with safe_open(str(made / checkpoints.build(kind, made)), "pt") as file:
        layers = [LORA_LAYERS[prefix].format(block) for block in range(2)]
        shapes = {layer: file.get_slice(f"{layer}.weight").get_shape() for layer in layers}
    lora = {}
    for layer, (rows, columns) in shapes.items():
        lora[f"diffusion_model.{layer}.lora_A.weight"] = torch.full((1, columns), 0.01)
        lora[f"diffusion_model.{layer}.lora_B.weight"] = torch.full((rows, 1), 0.01)
    save_file(lora, str(path))


def replace_loaders(prompt: dict) -> dict:
    """The API prompt with test nodes in the place of the loaders of text encoders and VAEs; nothing else changes."""
    replaced = {}
    for key, node in prompt.items():
        inputs = node["inputs"]
        if node["class_type"] in ("CLIPLoader", "DualCLIPLoader"):
            node = {"class_type": "TestTextEncoder", "inputs": {"channels": TEXT_CHANNELS[inputs["type"]]}}
        elif node["class_type"] == "VAELoader":
            node = {"class_type": "TestVAE", "inputs": {"kind": vae_kind(inputs["vae_name"])}}
        replaced[key] = node
    return replaced


def vae_kind(name: str) -> str:
    if "audio" in name:
        return "audio"
    return "wan" if name.startswith("wan") else "deep"
