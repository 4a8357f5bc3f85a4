"""The trained model on disk: one safetensors file in Wan's own names, one with the prompts' embeddings.

Both hosts read the same two files: ComfyUI by its own loader, diffusers through ``demo/model.py``.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import demo_files
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from wan import WanModel, WanSizes

WEIGHTS = demo_files.WEIGHTS
MODEL_FILE = demo_files.MODEL.name
PROMPTS_FILE = demo_files.PROMPTS.name


def save(folder: Path, sizes: WanSizes, weights: dict, table: torch.Tensor, texts: tuple[str, ...]) -> None:
    """Write both files in bfloat16. ``table`` is [prompts + 1, T, 64]; its last row is the empty prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {"text_dim": sizes.text, "num_heads": sizes.heads}  # what ComfyUI cannot see from the tensors' shapes
    metadata = {"config": json.dumps({"transformer": shapes}), "sizes": json.dumps(asdict(sizes))}
    half = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(half, folder / MODEL_FILE, metadata=metadata)
    embeddings = {"embeddings": table.detach().to("cpu", torch.bfloat16).contiguous()}
    save_file(embeddings, folder / PROMPTS_FILE, metadata={"texts": json.dumps(texts, ensure_ascii=False)})


def load(folder: Path = WEIGHTS, device: torch.device | str = "cpu") -> tuple[WanModel, torch.Tensor, list[str]]:
    """Model in float32 for evaluation, embeddings [prompts + 1, T, 64] (last: the empty prompt), the prompts' texts."""
    with safe_open(folder / MODEL_FILE, "pt") as file:
        sizes = WanSizes(**json.loads(file.metadata()["sizes"]))
    with safe_open(folder / PROMPTS_FILE, "pt") as file:
        texts = json.loads(file.metadata()["texts"])
    model = WanModel(sizes)
    model.load_state_dict(load_file(folder / MODEL_FILE))
    table = load_file(folder / PROMPTS_FILE)["embeddings"].float()
    return model.requires_grad_(False).eval().to(device), table.to(device), texts
