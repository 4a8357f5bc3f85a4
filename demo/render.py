"""A flow-matching Euler sampler with a prompt and a negative prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

TRAIN_TIMESTEPS = 1000.0


@dataclass(frozen=True)
class Clip:
    """What is rendered. Sizes are of the latents: a cell is 4 x 4 pixels of one frame."""

    frames: int = 8
    height: int = 32
    width: int = 32
    steps: int = 16
    shift: float = 3.0
    guidance: float = 2.0
    seed: int = 10

    @property
    def tokens(self) -> int:
        """Length of the self-attention sequence with patches of 1 x 2 x 2."""
        return self.frames * (self.height // 2) * (self.width // 2)

    @property
    def latent_shape(self) -> tuple[int, int, int, int, int]:
        return (1, 16, self.frames, self.height, self.width)


def noise_levels(steps: int, shift: float) -> list[float]:
    """steps + 1 noise levels from 1 to 0; a shift above 1 spends more steps at high noise."""
    shares = [1.0 - step / steps for step in range(steps + 1)]
    return [shift * share / (1.0 + (shift - 1.0) * share) for share in shares]


def start_noise(clip: Clip) -> torch.Tensor:
    """Gaussian noise of the clip's seed, made on the CPU so that every device starts from the same."""
    random = torch.Generator().manual_seed(clip.seed)
    return torch.randn(clip.latent_shape, generator=random)


@torch.inference_mode()
def sample(
    transformer,
    noise: torch.Tensor,
    prompt: torch.Tensor,
    negative: torch.Tensor,
    clip: Clip,
    each_step: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Latents at noise level 0, float32. The model computes in the prompt's dtype."""
    levels = noise_levels(clip.steps, clip.shift)
    latents = noise.float()
    for level, following in zip(levels, levels[1:], strict=False):
        timestep = torch.full((1,), level * TRAIN_TIMESTEPS, device=noise.device)
        model_input = latents.to(prompt.dtype)
        guided = transformer(model_input, timestep, prompt, return_dict=False)[0].float()
        unguided = transformer(model_input, timestep, negative, return_dict=False)[0].float()
        velocity = unguided + clip.guidance * (guided - unguided)
        latents = latents + (following - level) * velocity
        each_step()
    return latents
