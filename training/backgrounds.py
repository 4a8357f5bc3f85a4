"""Backgrounds and the ground line, by formulas."""

from __future__ import annotations

import math

import torch
from painting import edge, mix
from torch import Tensor


def background(clip: dict[str, Tensor], phases: Tensor, x: Tensor, y: Tensor, time: Tensor, pixel: Tensor) -> Tensor:
    """Share of the second color, [B, F, H, W] from 0 to 1, at places ``x`` and ``y`` of a frame.

    Lengths, and ``pixel``, the width of one, are half frame heights; ``clip`` and ``phases`` are those of a Scenes.
    """
    phases = phases.view(len(phases), -1, 1, 1, 1)
    scale, slant = (clip[name].view(-1, 1, 1, 1) for name in ("scale", "slant"))
    sine, cosine = slant.sin(), slant.cos()
    u, v = (x * cosine + y * sine) * scale, (y * cosine - x * sine) * scale
    soft = pixel * scale * math.pi
    stripes = 0.5 + 0.5 * (torch.sin(math.pi * u + phases[:, 0]) / soft).clamp(-1.0, 1.0)
    squares = torch.sin(math.pi * u + phases[:, 0]) * torch.sin(math.pi * v + phases[:, 1])
    checker = 0.5 + 0.5 * (squares / soft).clamp(-1.0, 1.0)
    waves = 0.5 + 0.25 * (
        torch.sin(2.0 * u + 1.3 * torch.sin(1.7 * v + phases[:, 2] + 2.0 * time) + phases[:, 3])
        + torch.sin(2.7 * v - 0.8 * u + phases[:, 4] - 1.5 * time)
    )
    clouds = torch.sin(1.3 * u + phases[:, 5]) * torch.sin(2.3 * v + 0.7 * u + phases[:, 6])
    clouds = clouds + 0.5 * torch.sin(3.1 * u + phases[:, 7]) * torch.sin(4.3 * v + phases[:, 8])
    sky = (0.15 + 0.25 * y + 0.6 * torch.sigmoid(5.0 * (clouds - 0.35))).clamp(0.0, 1.0)
    stars = _dots(u, v, 0.13, soft / math.pi)
    meadow = _dots(u, v, 0.26, soft / math.pi)
    patterns = (stripes, checker, waves, sky, stars, meadow)
    return sum(clip["background"][:, index].view(-1, 1, 1, 1) * pattern for index, pattern in enumerate(patterns))


def _dots(u: Tensor, v: Tensor, radius: float, soft: Tensor) -> Tensor:
    """One dot in each unit square, at a place that depends on the square."""
    column, row = u.floor(), v.floor()
    hashed = torch.sin(12.9898 * column + 78.233 * row)
    to_x = u - column - 0.5 - 0.3 * torch.sin(57.0 * hashed)
    to_y = v - row - 0.5 - 0.3 * torch.sin(91.0 * hashed)
    size = radius * (0.7 + 0.3 * torch.sin(33.0 * hashed))
    return (0.5 - (torch.hypot(to_x, to_y) - size) / soft).clamp(0.0, 1.0)


def cover_with_ground(
    colors: list[Tensor], clip: dict[str, Tensor], phases: Tensor, x: Tensor, y: Tensor, pixel: Tensor
) -> None:
    """Draw the ground over ``colors``, three of [B, F, H, W]; the others as for ``background``."""
    phases = phases.view(len(phases), -1, 1, 1, 1)
    level = clip["hill"].view(-1, 1, 1, 1)
    line = level + 0.16 * torch.sin(2.1 * x + phases[:, 9]) + 0.08 * torch.sin(4.7 * x + phases[:, 10])
    cover = edge(line - y, pixel)
    for index in range(3):
        ground = clip["ground"][:, index].view(-1, 1, 1, 1) * (1.15 - 0.3 * (y - line).clamp(0.0, 1.0))
        colors[index] = mix(colors[index], ground, cover)
