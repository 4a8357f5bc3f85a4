"""Drawn scenes: a moving background, up to five objects that turn, move and cover each other, a hill line, light and a
camera. The same for the same seed on every device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from backgrounds import background, cover_with_ground
from objects import paint
from painting import TIME_PER_FRAME, mix, pixels
from prompts import BACKGROUNDS, OBJECTS, SCENES, SHAPES, TEXTURES, Thing
from torch import Tensor


@dataclass(frozen=True)
class Scenes:
    """Drawn numbers of a batch. ``clip`` [B, n] and ``thing`` [B, OBJECTS, n] by name, choices as one-hot weights."""

    clip: dict[str, Tensor]
    thing: dict[str, Tensor]
    phases: Tensor  # [B, 12], angles of clouds, waves and hills


CLIP_RANGES = ("scale", "slant", "zoom", "hill", "light", "brighten")
THING_RANGES = ("radius", "grow", "x", "y", "vx", "vy", "orbit", "pace", "bounce", "angle", "spin")
COLOR_JITTER = 0.06


def draw_scenes(kinds: Tensor, random: torch.Generator, device: torch.device | str) -> Scenes:
    """Scenes of the places ``kinds`` [B] in SCENES; ``random`` is a CPU generator, so that devices agree."""
    kinds = kinds.cpu()
    batch = len(kinds)

    def between(ranges: Tensor, *shape: int) -> Tensor:
        low, high = ranges[kinds].unbind(-1)
        return (low + (high - low) * torch.rand(*shape, generator=random)).to(device)

    def colors(values: Tensor, *shape: int) -> Tensor:
        return (values[kinds] + COLOR_JITTER * (2.0 * torch.rand(*shape, generator=random) - 1.0)).to(device)

    clip = {name: between(_clip_ranges(name), batch) for name in CLIP_RANGES}
    clip["pan"] = between(torch.tensor([prompt.pan for prompt in SCENES]), batch, 2)
    clip["background"] = _one_hot([prompt.background for prompt in SCENES], BACKGROUNDS)[kinds].to(device)
    for name in ("low", "high", "ground"):
        clip[name] = colors(torch.tensor([getattr(prompt, name) for prompt in SCENES]), batch, 3)
    thing = {name: between(_thing_ranges(name), batch, OBJECTS) for name in THING_RANGES}
    for name in ("color", "other"):
        thing[name] = colors(torch.tensor(_of_things(name)), batch, OBJECTS, 3)
    for name, names in (("shape", SHAPES), ("texture", TEXTURES)):
        thing[name] = _one_hot(sum(_of_things(name), []), names).view(-1, OBJECTS, len(names))[kinds].to(device)
    for name in ("round", "texture_scale"):
        thing[name] = torch.tensor(_of_things(name))[kinds].to(device)
    present = [[place < len(prompt.things) for place in range(OBJECTS)] for prompt in SCENES]
    thing["present"] = torch.tensor(present, dtype=torch.float32)[kinds].to(device)
    thing["phase"] = (2 * math.pi * torch.rand(batch, OBJECTS, generator=random)).to(device)
    phases = (2 * math.pi * torch.rand(batch, 12, generator=random)).to(device)
    return Scenes(clip, thing, phases)


def _clip_ranges(name: str) -> Tensor:
    return torch.tensor([getattr(prompt, name) for prompt in SCENES], dtype=torch.float32)


def _of_things(name: str) -> list[list]:
    """A field of each prompt's things, filled up to OBJECTS with the default thing's."""
    rows = []
    for prompt in SCENES:
        things = (*prompt.things, *(Thing() for _ in range(OBJECTS - len(prompt.things))))
        rows.append([getattr(thing, name) for thing in things])
    return rows


def _thing_ranges(name: str) -> Tensor:
    return torch.tensor(_of_things(name), dtype=torch.float32)


def _one_hot(values: list[str], names: tuple[str, ...]) -> Tensor:
    return torch.eye(len(names))[[names.index(value) for value in values]]


def render(scenes: Scenes, frames: int, height: int, width: int) -> Tensor:
    """Frames [B, F, 3, H, W] from 0 to 1, float32 on the scenes' device."""
    clip, thing = scenes.clip, scenes.thing
    device = scenes.phases.device
    pixel = 2.0 / height
    time = torch.arange(frames, device=device).view(1, -1, 1, 1) * TIME_PER_FRAME
    x, y = pixels(height, width, device)
    x, y = x.view(1, 1, 1, -1), y.view(1, 1, -1, 1)

    def each(value: Tensor) -> Tensor:
        return value.view(-1, 1, 1, 1)

    closer = torch.exp(-each(clip["zoom"]) * torch.sin(time))
    x, y, pixel = x * closer, y * closer, pixel * closer
    moved_x = x + each(clip["pan"][:, 0]) * time
    moved_y = y + each(clip["pan"][:, 1]) * time
    share = background(clip, scenes.phases, moved_x, moved_y, time, pixel)
    colors = [mix(each(clip["low"][:, c]), each(clip["high"][:, c]), share) for c in range(3)]

    for place in range(OBJECTS):
        paint(colors, {name: value[:, place] for name, value in thing.items()}, x, y, time, pixel, width / height)
    cover_with_ground(colors, clip, scenes.phases, moved_x, y, pixel)
    gain = each(clip["light"]) + each(clip["brighten"]) * time.clamp_max(1.5)
    return (torch.stack(colors, dim=2) * gain.unsqueeze(2)).clamp(0.0, 1.0)
