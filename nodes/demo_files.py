"""The demo model's two files and its prompts. Shared by the demo's nodes, the demo and training."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import torch

WEIGHTS = Path(__file__).resolve().parents[1] / "demo" / "weights"
MODEL = WEIGHTS / "vc_attention_demo_wan.safetensors"
PROMPTS = WEIGHTS / "vc_attention_demo_prompts.safetensors"
DEFAULT_PROMPT = "balloons rise into a cloudy sky"


@lru_cache(maxsize=1)
def prompt_texts() -> tuple[str, ...]:
    """What the model was trained to show; () where the file is missing."""
    from safetensors import safe_open

    if not PROMPTS.is_file():
        return ()
    with safe_open(PROMPTS, "pt") as file:
        return tuple(json.loads(file.metadata()["texts"]))


def prompt_embeddings(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The encoded prompt and the encoded empty prompt, float32 [1, T, 64] each."""
    from safetensors.torch import load_file

    if text not in prompt_texts():
        raise ValueError(f"the demo model knows only its own prompts, got {text!r}: {', '.join(prompt_texts())}")
    table = load_file(PROMPTS)["embeddings"].float()
    return table[prompt_texts().index(text)][None], table[-1:]
