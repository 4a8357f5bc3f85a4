"""From latents to frames, and from two clips to one picture that shows both and their difference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from model import LATENT_CHANNELS, PATCH, SEED_CHANNELS
from PIL import Image, ImageDraw, ImageFont

PIXELS_PER_TOKEN = 10
FRAMES_PER_LATENT = 4
COLOR_SEED = 5
CONTRAST = 0.17  # standard deviation of a color channel, of a range of 1
MARGIN = 8
LABEL_HEIGHT = 24
BACKGROUND = (18, 18, 20)
TEXT_COLOR = (235, 235, 235)


@dataclass(frozen=True)
class Exposure:
    """Mean and spread of a clip's three color axes. Taken from one clip, used for every clip beside it."""

    mean: torch.Tensor
    spread: torch.Tensor


def color_fields(latents: torch.Tensor) -> torch.Tensor:
    """Latents [1, C, F, H, W] as three color axes [3, frames, height, width] by a fixed linear map.

    Stands in for a VAE's decoder: the mean of each patch, projected, and enlarged in space and time.
    """
    painted = latents[0, SEED_CHANNELS:].float().cpu()
    random = torch.Generator().manual_seed(COLOR_SEED)
    axes = torch.linalg.qr(torch.randn(LATENT_CHANNELS - SEED_CHANNELS, 3, generator=random))[0]
    tokens = F.avg_pool3d(painted, PATCH)
    fields = torch.einsum("cfhw,ca->afhw", tokens, axes)
    _, frames, height, width = fields.shape
    pictures = F.interpolate(fields.transpose(0, 1), scale_factor=PIXELS_PER_TOKEN, mode="bicubic", align_corners=False)
    series = pictures.permute(1, 2, 3, 0).reshape(1, -1, frames)
    series = F.interpolate(series, size=(frames - 1) * FRAMES_PER_LATENT + 1, mode="linear", align_corners=True)
    shape = (3, height * PIXELS_PER_TOKEN, width * PIXELS_PER_TOKEN, -1)
    return series.reshape(shape).permute(0, 3, 1, 2)


def meter(fields: torch.Tensor) -> Exposure:
    """The exposure that suits a clip."""
    return Exposure(fields.mean((1, 2, 3), keepdim=True), fields.std((1, 2, 3), keepdim=True).clamp_min(1e-6))


def develop(fields: torch.Tensor, exposure: Exposure) -> np.ndarray:
    """Frames [frames, height, width, 3], float32 from 0 to 255: one axis is brightness, two are color."""
    light, warm, green = (fields - exposure.mean) / exposure.spread
    red = light + 0.8 * warm - 0.3 * green
    blue = light - 0.8 * warm - 0.3 * green
    rgb = 0.5 + CONTRAST * torch.stack((red, light + 0.6 * green, blue), dim=-1)
    return (rgb.clamp(0, 1) * 255).numpy()


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
    frames, height, width, _ = rows[0][1].shape
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
            sheet.paste(Image.fromarray(clip[pick]), (left, top + LABEL_HEIGHT))
    draw.text((MARGIN, len(rows) * row_height + 4), footer, fill=TEXT_COLOR, font=ImageFont.load_default(size=12))
    sheet.save(path, optimize=True)


def save_animation(path: Path, clips: list[np.ndarray], frame_ms: int = 80) -> None:
    """The clips side by side as an animated WebP, forwards and backwards."""
    wide = np.concatenate(clips, axis=2)
    forth_and_back = [Image.fromarray(frame) for frame in (*wide, *wide[-2:0:-1])]
    forth_and_back[0].save(path, save_all=True, append_images=forth_and_back[1:], duration=frame_ms, loop=0, quality=80)
