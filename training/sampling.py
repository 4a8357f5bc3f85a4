"""Batched renders of the trained model: guided Euler steps, with a door for another self-attention at every step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from wan import Attend, WanModel

SHIFT = 3.0
GUIDANCE = 3.0
TIMESTEPS = 1000.0


def noise_levels(steps: int, shift: float = SHIFT) -> list[float]:
    """steps + 1 noise levels from 1 to 0; a shift above 1 spends more steps at high noise."""
    shares = [1.0 - step / steps for step in range(steps + 1)]
    return [shift * share / (1.0 + (shift - 1.0) * share) for share in shares]


def start_noise(seeds: list[int], frames: int, height: int, width: int) -> Tensor:
    """Noise [B, 16, F, height / 4, width / 4] of pixel sizes, each clip from its own seed, made on the CPU."""
    shape = (16, frames, height // 4, width // 4)
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


@torch.no_grad()
def sample(
    model: WanModel,
    noise: Tensor,
    prompt: Tensor,
    empty: Tensor,
    levels: list[float],
    guidance: float = GUIDANCE,
    attend_at: Callable[[int], Attend | None] = lambda step: None,
) -> Tensor:
    """Latents [B, 16, F, h, w] at the last noise level, float32.

    ``prompt`` [B, T, 64] and ``empty`` [1, T, 64] are rows of the embeddings. Each step is one forward over 2 B clips:
    the prompts' rows first, the empty prompts' rows behind. ``attend_at(step)`` gives the self-attention of a step.
    """
    batch = len(noise)
    text = torch.cat((prompt, empty.expand_as(prompt)))
    latents = noise.float()
    for step, (level, following) in enumerate(zip(levels, levels[1:], strict=False)):
        timestep = torch.full((2 * batch,), level * TIMESTEPS, device=noise.device)
        both = model(torch.cat((latents, latents)), timestep, text, attend_at(step)).float()
        guided, unguided = both.chunk(2)
        latents = latents + (following - level) * (unguided + guidance * (guided - unguided))
    return latents
