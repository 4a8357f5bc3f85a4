"""A checkpoint in Wan's own names, as ComfyUI loads it, for diffusers' transformer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
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


def read_sizes(path: Path) -> dict[str, int]:
    """The model's sizes, as training wrote them into the file."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["sizes"])


def read_weights(path: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The weights under diffusers' ``names``, float32; a tensor that none of them asks for is an error."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    weights = {name: tensors.pop(wan_name(name)).float() for name in names}
    if tensors:
        raise KeyError(f"{path} holds tensors that the model has no place for: {sorted(tensors)}")
    return weights
