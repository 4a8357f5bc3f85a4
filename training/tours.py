"""A camera's way over a photograph: it pans, moves closer and turns a little, and never sees the border.

Lengths are half heights of the photograph, whose middle is 0; a frame's own half height is 1 in its own coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from painting import TIME_PER_FRAME, between, fold, pixels
from photographs import Album
from prompts import TOURS
from torch import Tensor

RANGES = ("pan", "zoom", "view", "angle", "spin", "light", "brighten")
SLANT = 0.4  # most of a pan's angle against the horizontal, radians
SETTLED = 3.0  # seconds' worth of zoom and turn that a clip approaches, however long it is


@dataclass(frozen=True)
class Tours:
    """Drawn numbers of a batch: ``photograph`` [B] int64, the others float32 [B], ``start`` and ``heading`` [B, 2]."""

    photograph: Tensor
    mirrored: Tensor  # 1 or -1
    start: Tensor  # from -1 to 1: where in the room that the photograph leaves
    heading: Tensor  # unit vector of the pan
    numbers: dict[str, Tensor]


def draw_tours(kinds: Tensor, photographs: int, random: torch.Generator, device: torch.device | str) -> Tours:
    """Tours of the places ``kinds`` [B] in TOURS over one of so many photographs; ``random`` is a CPU generator."""
    batch = len(kinds)
    numbers = {}
    for name in RANGES:
        ranges = torch.tensor([getattr(tour, name) for tour in TOURS], dtype=torch.float32)
        numbers[name] = between(ranges[kinds], random).to(device)
    photograph = torch.randint(photographs, (batch,), generator=random)
    mirrored, side = (1.0 - 2.0 * torch.randint(2, (2, batch), generator=random)).unbind()
    start = 2.0 * torch.rand(batch, 2, generator=random) - 1.0
    slant = SLANT * (2.0 * torch.rand(batch, generator=random) - 1.0)
    heading = torch.stack((side * slant.cos(), slant.sin()), dim=1)
    return Tours(*(value.to(device) for value in (photograph, mirrored, start, heading)), numbers)


def way(tours: Tours, frames: int, aspect: float, room: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Center [B, F, 2], half height [B, F] and angle [B, F] of what each frame shows.

    ``aspect`` is a frame's width over its height, ``room`` [B] the photographs'. All of a frame lies inside.
    """
    numbers = {name: value[:, None] for name, value in tours.numbers.items()}
    time = torch.arange(frames, device=room.device)[None] * TIME_PER_FRAME
    settling = time / (1.0 + time / SETTLED)
    angle = numbers["angle"] + numbers["spin"] * settling
    lean = (numbers["angle"].abs() + SETTLED * numbers["spin"].abs()).sin()
    border = torch.stack((room, torch.ones_like(room)), dim=1)[:, None]  # [B, 1, 2], half width and half height
    box = torch.cat((aspect + lean, 1.0 + aspect * lean), dim=1)[:, None]  # of a turned frame of half height 1
    widest = numbers["view"] * (border / box).amin(2)
    closer = numbers["zoom"] * settling + SETTLED * (-numbers["zoom"]).clamp_min(0.0)
    size = widest * torch.exp(-closer)
    travel = tours.heading[:, None] * (numbers["pan"] * time)[..., None]
    place = fold(tours.start[:, None] + travel / (border - widest[..., None] * box).clamp_min(0.05))
    return place * (border - size[..., None] * box), size, angle


def render(tours: Tours, album: Album, frames: int, height: int, width: int) -> Tensor:
    """Frames [B, F, 3, H, W] from 0 to 1, float32 on the album's device."""
    sheet, widths = album.for_height(height)
    widths = widths[tours.photograph]
    room = widths / sheet.shape[2]
    center, size, angle = (value.unflatten(1, (-1, 1, 1)) for value in way(tours, frames, width / height, room))
    x, y = pixels(height, width, sheet.device)
    x, y = x.view(1, 1, 1, -1), y.view(1, 1, -1, 1)
    across = center[..., 0] + size * (x * angle.cos() - y * angle.sin())
    down = center[..., 1] + size * (x * angle.sin() + y * angle.cos())
    across = across * tours.mirrored.view(-1, 1, 1, 1) / room.view(-1, 1, 1, 1)
    across = (across + 1.0) * (widths / sheet.shape[3]).view(-1, 1, 1, 1) - 1.0  # the sheet is wider
    grid = torch.stack((across, down), dim=-1).flatten(1, 2)
    shown = F.grid_sample(sheet[tours.photograph], grid, padding_mode="border", align_corners=False)
    shown = shown.unflatten(2, (frames, height)).transpose(1, 2)
    return (shown * _light(tours, frames)).clamp(0.0, 1.0)


def _light(tours: Tours, frames: int) -> Tensor:
    """[B, F, 1, 1, 1]."""
    time = torch.arange(frames, device=tours.start.device) * TIME_PER_FRAME
    gain = tours.numbers["light"][:, None] + tours.numbers["brighten"][:, None] * time.clamp_max(1.5)
    return gain.view(-1, frames, 1, 1, 1)
