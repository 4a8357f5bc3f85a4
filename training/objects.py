"""The objects of a scene: shapes, textures and light on them."""

from __future__ import annotations

import math

import torch
from painting import edge, mix, wrap
from torch import Tensor


def paint(colors: list[Tensor], thing: dict, x: Tensor, y: Tensor, time: Tensor, pixel: Tensor, aspect: float) -> None:
    """Draw one object of every clip over ``colors``, three of [B, F, H, W].

    ``thing``: the object's numbers [B] and choices [B, n] by name. Lengths, and ``pixel``, the width of one, are half
    frame heights; ``aspect`` is a frame's width over its height.
    """
    one = {name: value.view(len(value), -1, 1, 1, 1).squeeze(1) for name, value in thing.items() if value.ndim == 1}
    turn = one["pace"] * time + one["phase"]
    reach_x, reach_y = aspect + 0.45, 1.45
    center_x = wrap(one["x"] * aspect + one["vx"] * time, reach_x) + one["orbit"] * turn.cos()
    center_y = wrap(one["y"] + one["vy"] * time, reach_y) + one["orbit"] * turn.sin() - one["bounce"] * turn.sin().abs()
    radius = one["radius"] + one["grow"] * (turn / (2.0 * math.pi)).frac()
    angle = one["angle"] + one["spin"] * time
    sine, cosine = angle.sin(), angle.cos()
    dx, dy = (x - center_x) / radius, (y - center_y) / radius
    u, v = dx * cosine + dy * sine, dy * cosine - dx * sine

    distance = _shape_distance(thing["shape"], u, v)
    cover = one["present"] * edge(distance * radius, pixel)
    share = _texture(thing["texture"], one["texture_scale"], u, v, pixel / radius)
    lit = _shade(dx, dy, one["round"])
    for index in range(3):
        first, second = (thing[name][:, index].view(-1, 1, 1, 1) for name in ("color", "other"))
        colors[index] = mix(colors[index], mix(first, second, share) * lit, cover)


def _shape_distance(weights: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """About the distance to the outline, negative inside, in radii."""
    far = torch.sqrt(u * u + v * v + 1e-9)
    around = torch.atan2(v, u)
    disc = far - 1.0
    box = torch.maximum(u.abs(), v.abs()) - 0.9
    star = far - (0.7 + 0.3 * torch.cos(5.0 * around))
    ring = (far - 0.85).abs() - 0.15
    body = torch.sqrt(u * u + (v / 0.55) ** 2 + 1e-9) - 1.0
    tail = torch.maximum(v.abs() + 0.8 * (u + 0.7), -1.6 - u)
    fish = torch.minimum(body, tail)
    string = torch.maximum(u.abs() - 0.06, (v - 1.8).abs() - 0.9)
    balloon = torch.minimum(disc, string)
    shapes = (disc, box, star, ring, fish, balloon)
    return sum(weights[:, index].view(-1, 1, 1, 1) * shape for index, shape in enumerate(shapes))


def _texture(weights: Tensor, scale: Tensor, u: Tensor, v: Tensor, pixel: Tensor) -> Tensor:
    """Share of the object's second color."""
    soft = pixel * scale * math.pi
    stripes = 0.5 + 0.5 * (torch.sin(math.pi * scale * u) / soft).clamp(-1.0, 1.0)
    around = torch.sin(2.0 * scale * torch.atan2(v, u)) * torch.sqrt(u * u + v * v + 1e-9)
    sectors = 0.5 + 0.5 * (around / (2.0 * scale * pixel)).clamp(-1.0, 1.0)
    dots = 0.5 + 0.5 * ((torch.sin(math.pi * scale * u) * torch.sin(math.pi * scale * v) - 0.4) / soft).clamp(-1.0, 1.0)
    patterns = (torch.zeros_like(u), stripes, sectors, dots)
    return sum(weights[:, index].view(-1, 1, 1, 1) * pattern for index, pattern in enumerate(patterns))


def _shade(dx: Tensor, dy: Tensor, roundness: Tensor) -> Tensor:
    """Light from above left on a ball; 1 everywhere where ``roundness`` is 0."""
    toward = torch.sqrt((1.0 - dx * dx - dy * dy).clamp_min(0.0))
    lit = 0.45 + 0.65 * (0.65 * toward - 0.45 * dx - 0.6 * dy).clamp(0.0, 1.0)
    return 1.0 + roundness * (lit - 1.0)
