"""The seeded transformer as a checkpoint in Wan's own names, as ComfyUI loads them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

# diffusers' name -> Wan's, as patterns; the first that matches the whole name is used.
NAMES = (
    (r"patch_embedding\.(\w+)", r"patch_embedding.\1"),
    (r"condition_embedder\.text_embedder\.linear_1\.(\w+)", r"text_embedding.0.\1"),
    (r"condition_embedder\.text_embedder\.linear_2\.(\w+)", r"text_embedding.2.\1"),
    (r"condition_embedder\.time_embedder\.linear_1\.(\w+)", r"time_embedding.0.\1"),
    (r"condition_embedder\.time_embedder\.linear_2\.(\w+)", r"time_embedding.2.\1"),
    (r"condition_embedder\.time_proj\.(\w+)", r"time_projection.1.\1"),
    (r"(blocks\.\d+)\.scale_shift_table", r"\1.modulation"),
    (r"(blocks\.\d+)\.attn1\.to_([qkv])\.(\w+)", r"\1.self_attn.\2.\3"),
    (r"(blocks\.\d+)\.attn1\.to_out\.0\.(\w+)", r"\1.self_attn.o.\2"),
    (r"(blocks\.\d+)\.attn1\.norm_([qk])\.(\w+)", r"\1.self_attn.norm_\2.\3"),
    (r"(blocks\.\d+)\.attn2\.to_([qkv])\.(\w+)", r"\1.cross_attn.\2.\3"),
    (r"(blocks\.\d+)\.attn2\.to_out\.0\.(\w+)", r"\1.cross_attn.o.\2"),
    (r"(blocks\.\d+)\.attn2\.norm_([qk])\.(\w+)", r"\1.cross_attn.norm_\2.\3"),
    (r"(blocks\.\d+)\.norm2\.(\w+)", r"\1.norm3.\2"),
    (r"(blocks\.\d+)\.ffn\.net\.0\.proj\.(\w+)", r"\1.ffn.0.\2"),
    (r"(blocks\.\d+)\.ffn\.net\.2\.(\w+)", r"\1.ffn.2.\2"),
    (r"scale_shift_table", r"head.modulation"),
    (r"proj_out\.(\w+)", r"head.head.\1"),
)


def wan_name(name: str) -> str:
    """Wan's name of a parameter of diffusers' WanTransformer3DModel (text to video)."""
    for pattern, replacement in NAMES:
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(replacement)
    raise KeyError(f"no Wan name is known for {name}")


def save_wan_checkpoint(transformer, path: Path) -> None:
    """Write a safetensors file; its metadata names what ComfyUI cannot see from shapes."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {
        wan_name(name): tensor.detach().contiguous() for name, tensor in transformer.state_dict().items()
    }
    config = transformer.config
    sizes = {"text_dim": config.text_dim, "num_heads": config.num_attention_heads}
    save_file(tensors, path, metadata={"config": json.dumps({"transformer": sizes})})
