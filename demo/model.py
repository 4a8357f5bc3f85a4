"""The demo's video model: a Wan transformer of 7 million weights, trained by ``training/train.py``.

It renders fifteen kinds of short clips. ComfyUI loads its file as it is; here it becomes a diffusers model.
"""

from __future__ import annotations

from pathlib import Path

import pack
import torch
from wan_checkpoint import read_sizes, read_weights

files = pack.load("demo_files")
latents = pack.load("demo_latents")

PROMPT = files.DEFAULT_PROMPT
FRAME_MS = 62.5  # the clips' own pace: 16 frames a second


def build_transformer(path: Path = files.MODEL):
    """A ``diffusers.WanTransformer3DModel`` in float32 on the CPU with the trained weights."""
    from diffusers import WanTransformer3DModel

    sizes = read_sizes(path)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=sizes["heads"],
        attention_head_dim=sizes["head_dim"],
        in_channels=sizes["channels"],
        out_channels=sizes["channels"],
        text_dim=sizes["text"],
        freq_dim=sizes["frequencies"],
        ffn_dim=sizes["ffn"],
        num_layers=sizes["layers"],
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    model.load_state_dict(read_weights(path, model.state_dict()))
    return model.requires_grad_(False).eval()


def attention_sizes(path: Path = files.MODEL) -> dict[str, int]:
    """Heads and head dimension."""
    sizes = read_sizes(path)
    return {"heads": sizes["heads"], "head_dim": sizes["head_dim"]}


def set_precision(model, dtype: torch.dtype) -> None:
    """Cast the weights as diffusers does when it loads a model: what it keeps in float32 stays."""
    for name, parameter in model.named_parameters():
        if not set(name.split(".")) & set(model._keep_in_fp32_modules):
            parameter.data = parameter.data.to(dtype)
