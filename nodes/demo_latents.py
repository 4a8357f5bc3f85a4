"""Between frames and the demo model's latents: a fixed linear transform that needs no trained decoder.

One latent cell is 4 x 4 pixels of one frame. Their colors are turned to one brightness and two color axes, each is
transformed by a cosine transform, and the 16 lowest coefficients are kept: 10 of brightness, 3 of each color axis.
The kept directions are orthonormal, so decoding is the transpose. Plain torch: the demo, the training and the decode
node share this file.
"""

from __future__ import annotations

import math

import torch

CELL = 4  # pixels along a side of one latent cell
CHANNELS = 16

# Each channel's spread over training clips, rounded; 0.25 where it is less, so that fine detail stays small.
SPREAD = (3.5, 0.6, 0.25, 0.25, 0.55, 0.25, 0.25, 0.25, 0.25, 0.25, 1.9, 0.25, 0.25, 1.1, 0.25, 0.25)

BRIGHTNESS = (1.0, 1.0, 1.0)
COLOR_AXES = ((1.0, 0.0, -1.0), (1.0, -2.0, 1.0))


def encode(frames: torch.Tensor) -> torch.Tensor:
    """Frames [B, F, 3, H, W] from 0 to 1, sides divisible by 4, as float32 latents [B, 16, F, H / 4, W / 4]."""
    batch, count, colors, height, width = frames.shape
    if height % CELL or width % CELL:
        raise ValueError(f"the sides of a frame must be divisible by {CELL}, got {height} x {width}")
    cells = frames.float().reshape(batch, count, colors, height // CELL, CELL, width // CELL, CELL)
    basis = _basis(frames.device).view(CHANNELS, colors, CELL, CELL)
    coefficients = torch.einsum("bfchpwq,kcpq->bkfhw", 2.0 * cells - 1.0, basis)
    return coefficients / _spread(frames.device)


def decode(latents: torch.Tensor) -> torch.Tensor:
    """Latents [B, 16, F, h, w] as float32 frames [B, F, 3, 4 h, 4 w], cut to 0 to 1."""
    batch, _, count, height, width = latents.shape
    basis = _basis(latents.device).view(CHANNELS, 3, CELL, CELL)
    cells = torch.einsum("bkfhw,kcpq->bfchpwq", latents.float() * _spread(latents.device), basis)
    frames = cells.reshape(batch, count, 3, height * CELL, width * CELL)
    return (0.5 * frames + 0.5).clamp(0.0, 1.0)


def _basis(device: torch.device) -> torch.Tensor:
    """[16, 48] orthonormal rows over (color, pixel row, pixel column)."""
    place = torch.arange(CELL, device=device, dtype=torch.float32)
    cosines = torch.cos(math.pi / CELL * (place + 0.5) * place[:, None])
    cosines = cosines / cosines.norm(dim=1, keepdim=True)
    rows = []
    for axis, highest in ((BRIGHTNESS, CELL - 1), *((axis, 1) for axis in COLOR_AXES)):
        color = torch.tensor(axis, device=device)
        color = color / color.norm()
        for down in range(highest + 1):
            rows += [
                torch.einsum("c,p,q->cpq", color, cosines[down], cosines[across]).flatten()
                for across in range(highest + 1 - down)
            ]
    return torch.stack(rows)


def _spread(device: torch.device) -> torch.Tensor:
    return torch.tensor(SPREAD, device=device).view(1, CHANNELS, 1, 1, 1)
