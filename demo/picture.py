"""From latents to frames, and from two clips to one picture that shows both and their difference."""

from __future__ import annotations

from pathlib import Path

import model
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

ENLARGED = 2  # the strip shows a pixel as so many
MARGIN = 8
LABEL_HEIGHT = 24
BACKGROUND = (18, 18, 20)
TEXT_COLOR = (235, 235, 235)


def develop(latents: torch.Tensor) -> np.ndarray:
    """Latents [1, 16, F, h, w] as frames [F, 4 h, 4 w, 3], float32 from 0 to 255."""
    return (model.latents.decode(latents.cpu())[0] * 255).permute(0, 2, 3, 1).contiguous().numpy()


def to_bytes(frames: np.ndarray) -> np.ndarray:
    """Frames as uint8, rounded."""
    return np.clip(np.rint(frames), 0, 255).astype(np.uint8)


def amplified_difference(reference: np.ndarray, other: np.ndarray, gain: float) -> np.ndarray:
    """Difference of two clips of ``develop`` around middle grey, uint8."""
    return to_bytes(128 + gain * (other - reference))


def difference_gain(reference: np.ndarray, other: np.ndarray) -> int:
    """A round factor that makes the usual difference visible: 1, 2, 4, ... 64."""
    spread = float(np.std(other - reference))
    wanted = 24.0 / max(spread, 1e-3)
    return int(2 ** np.clip(np.floor(np.log2(wanted)), 0, 6))


def save_strip(path: Path, rows: list[tuple[str, np.ndarray]], shown: int, footer: str) -> None:
    """One row per clip, ``shown`` frames of it spread over its length, a label above each row."""
    frames, *sides, _ = rows[0][1].shape
    height, width = (ENLARGED * side for side in sides)
    picks = np.linspace(0, frames - 1, shown).round().astype(int)
    row_height = LABEL_HEIGHT + height + MARGIN
    size = (MARGIN + shown * (width + MARGIN), len(rows) * row_height + LABEL_HEIGHT + MARGIN)
    sheet = Image.new("RGB", size, BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=15)
    for row, (label, clip) in enumerate(rows):
        top = row * row_height
        draw.text((MARGIN, top + 4), label, fill=TEXT_COLOR, font=font)
        for column, pick in enumerate(picks):
            left = MARGIN + column * (width + MARGIN)
            frame = Image.fromarray(clip[pick]).resize((width, height), Image.Resampling.BICUBIC)
            sheet.paste(frame, (left, top + LABEL_HEIGHT))
    draw.text((MARGIN, len(rows) * row_height + 4), footer, fill=TEXT_COLOR, font=ImageFont.load_default(size=12))
    sheet.save(path, optimize=True)


def save_animation(path: Path, clips: list[np.ndarray], frame_ms: float = model.FRAME_MS) -> None:
    """The clips side by side as an animated WebP."""
    first, *others = (Image.fromarray(frame) for frame in np.concatenate(clips, axis=2))
    first.save(path, save_all=True, append_images=others, duration=round(frame_ms), loop=0, quality=80)
