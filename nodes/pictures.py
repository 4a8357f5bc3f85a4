"""What the pack's pictures share: colors, fonts, and the step from a drawing to ComfyUI's IMAGE."""

from __future__ import annotations

import logging

import numpy as np
import torch
from comfy_api.latest import ui
from PIL import Image, ImageFont

log = logging.getLogger("VC Attention")

BACKGROUND = (22, 22, 26)
PANEL = (34, 34, 40)
TEXT = (232, 232, 236)
MUTED = (150, 150, 158)
ACTIVE = (52, 199, 110)
IDLE = (98, 98, 110)
ACCENT = (255, 196, 64)
MARGIN = 16


def font(size: int):
    """Pillow's own font."""
    return ImageFont.load_default(size=size)


def wrapped(draw, text: str, face, width: int) -> list[str]:
    """The text in lines that fit a width; a word longer than a line stays whole."""
    lines, line = [], ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if line and draw.textlength(longer, font=face) > width:
            lines.append(line)
            line = word
        else:
            line = longer
    return [*lines, line] if line else lines


def as_image(picture: Image.Image) -> torch.Tensor:
    """A drawing as ComfyUI's IMAGE: [1, height, width, 3], float32 from 0 to 1."""
    return torch.from_numpy(np.asarray(picture.convert("RGB"), dtype=np.float32) / 255.0)[None]


def preview(image: torch.Tensor):
    """The picture on its node. ComfyUI writes it to its temp folder; a prompt is not lost where that fails."""
    try:
        return ui.PreviewImage(image)
    except Exception:
        log.warning("VC Attention: a picture could not be shown on its node", exc_info=True)
        return None
