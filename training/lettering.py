"""Words on the screen: letters as fields of distances, sharp at every size, that scroll over a clip and fade in.

The font is the one that comes with Pillow (Aileron, CC0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from painting import TIME_PER_FRAME, between, edge, pixels, wrap
from PIL import Image, ImageDraw, ImageFont
from prompts import SCENES, Title
from torch import Tensor

WORDS = ("HELLO", "START", "VIDEO", "NEWS", "THE END", "WOW", "2026", "3, 2, 1")
CAPITAL = 64  # pixels of a capital letter where the distances are measured
MARGIN = 0.3  # around a word, in capitals
BOLD, OUTLINE = 0.025, 0.1  # what strokes gain on each side, and how far the outline reaches, in capitals
RANGES = ("height", "x", "y", "vx", "vy", "opacity", "appear")
COLOR_JITTER = 0.04


@dataclass(frozen=True)
class Words:
    """``distance`` [W, 1, h, w] to the outline of each word, negative inside, in capitals; every word is centered.
    ``reach`` [W, 2]: half width and half height of a word's field."""

    distance: Tensor
    reach: Tensor


@dataclass(frozen=True)
class Titles:
    """Drawn numbers of a batch: ``word`` [B] int64, ``numbers`` [B], ``color`` and ``outline`` [B, 3]."""

    word: Tensor
    numbers: dict[str, Tensor]
    color: Tensor
    outline: Tensor


def load(device: torch.device | str) -> Words:
    """All of WORDS."""
    inked = [_ink(word) for word in WORDS]
    width = max(ink.shape[1] for ink in inked)
    fields = [F.pad(ink, ((width - ink.shape[1]) // 2, (width - ink.shape[1] + 1) // 2)) for ink in inked]
    distance = torch.stack([(_distance_to(ink) - _distance_to(~ink)) / CAPITAL for ink in fields])[:, None]
    reach = torch.tensor([[width / 2, distance.shape[2] / 2]]).expand(len(WORDS), 2) / CAPITAL
    return Words(distance.to(device), reach.to(device))


def _ink(word: str) -> Tensor:
    """[h, w] bool: the word with MARGIN around it."""
    font = ImageFont.load_default(size=100)
    top, bottom = font.getbbox("H")[1::2]
    font = ImageFont.load_default(size=100 * CAPITAL / (bottom - top))
    margin = round(MARGIN * CAPITAL)
    left, top, right, bottom = font.getbbox(word)
    image = Image.new("L", (round(right - left) + 2 * margin, CAPITAL + 2 * margin))
    capital_top = font.getbbox("H")[1]
    ImageDraw.Draw(image).text((margin - left, margin - capital_top), word, fill=255, font=font)
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return values.view(image.height, image.width) > 127


def _distance_to(ink: Tensor) -> Tensor:
    """[h, w] pixels from each pixel's center to the nearest inked pixel, less half a pixel; 0 on the ink."""
    height, width = ink.shape
    far = float(height**2 + width**2)
    rows, columns = (torch.arange(side, dtype=torch.float32) for side in (height, width))
    squares = (rows[:, None] - rows) ** 2  # down first, then across
    down = (squares[:, :, None] + torch.where(ink, 0.0, far)).amin(1)
    squares = (columns[:, None] - columns) ** 2
    across = torch.stack([(squares + row).amin(1) for row in down])
    return (across.sqrt() - 0.5).clamp_min(0.0)


def draw_titles(kinds: Tensor, random: torch.Generator, device: torch.device | str) -> Titles:
    """Titles of the places ``kinds`` [B] in SCENES, each with one; ``random`` is a CPU generator."""
    titles = [SCENES[kind].title for kind in kinds.tolist()]
    numbers = {name: between(_values(titles, name), random).to(device) for name in RANGES}
    word = torch.randint(len(WORDS), (len(titles),), generator=random).to(device)
    jitter = COLOR_JITTER * (2.0 * torch.rand(2, len(titles), 3, generator=random) - 1.0)
    color, outline = ((_values(titles, name) + jitter[at]).to(device) for at, name in enumerate(("color", "outline")))
    return Titles(word, numbers, color, outline)


def _values(titles: list[Title], name: str) -> Tensor:
    return torch.tensor([getattr(title, name) for title in titles], dtype=torch.float32)


def paint(frames: Tensor, titles: Titles, words: Words) -> Tensor:
    """``frames`` [B, F, 3, H, W] with a word over each clip."""
    fill, outline = coverage(titles, words, *frames.shape[1:2], *frames.shape[3:])
    for color, cover in ((titles.outline, outline), (titles.color, fill)):
        frames = torch.lerp(frames, color[:, None, :, None, None].expand_as(frames), cover.unsqueeze(2))
    return frames.clamp(0.0, 1.0)


def coverage(titles: Titles, words: Words, frames: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Opacity of the letters and of the letters with their outline: [B, F, H, W] from 0 to 1."""
    numbers = {name: value.view(-1, 1, 1, 1) for name, value in titles.numbers.items()}
    device, aspect = titles.word.device, width / height
    time = torch.arange(frames, device=device).view(1, -1, 1, 1) * TIME_PER_FRAME
    x, y = pixels(height, width, device)
    reach = words.reach[titles.word]
    half_width = reach[:, 0].view(-1, 1, 1, 1) * numbers["height"]
    center_x = wrap(numbers["x"] * aspect + numbers["vx"] * time, aspect + half_width)
    across = (x.view(1, 1, 1, -1) - center_x) / half_width
    down = (y.view(1, 1, -1, 1) - numbers["y"] - numbers["vy"] * time) / (
        reach[:, 1].view(-1, 1, 1, 1) * numbers["height"]
    )
    grid = torch.stack(torch.broadcast_tensors(across, down), dim=-1).flatten(1, 2)
    distance = F.grid_sample(words.distance[titles.word], grid, padding_mode="border", align_corners=False)
    distance = distance.view(-1, frames, height, width) * numbers["height"]
    opacity = (numbers["opacity"] + numbers["appear"] * time).clamp(0.0, 1.0)
    pixel = 2.0 / height
    fill, outline = (edge(distance - more * numbers["height"], pixel) for more in (BOLD, OUTLINE))
    return opacity * fill, opacity * outline
