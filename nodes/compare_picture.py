"""Pictures of a comparison: the clips above each other, the difference, and the numbers frame by frame."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from .comparison import colors, summary
from .pictures import ACCENT, ACTIVE, BACKGROUND, MARGIN, MUTED, PANEL, TEXT, font

MOST_FRAME_WIDTH, MOST_FRAME_HEIGHT = 384, 384  # of a frame in the strip
GAP = 8
LABEL = 22
CURVE_SIZE = (960, 420)
# Of each: its key in the result, its label, its color.
CURVES = (("psnr", "PSNR, dB", ACTIVE), ("ssim", "SSIM", ACCENT), ("flip", "FLIP (0 is equal)", (240, 120, 120)))


def difference(reference: Tensor, other: Tensor, frame: int, amplification: int) -> Tensor:
    """What differs in one frame around middle gray, [1, height, width, 3]."""
    return (0.5 + amplification * (colors(other[frame]) - colors(reference[frame]))).clamp(0.0, 1.0)[None]


def draw_strip(reference: Tensor, other: Tensor, picks: list[int], amplification: int, result: dict) -> Image.Image:
    """Three rows, a column a picked frame: reference, other, amplified difference."""
    size = _frame_size(reference.shape[2], reference.shape[1])
    labels = ("reference", "other", f"difference x {amplification}")
    width = max(2 * MARGIN + len(picks) * (size[0] + GAP) - GAP, 640)
    row = LABEL + size[1] + GAP
    sheet = Image.new("RGB", (width, 2 * MARGIN + len(labels) * row + 2 * LABEL), BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    for column, pick in enumerate(picks):
        left = MARGIN + column * (size[0] + GAP)
        frames = (colors(reference[pick]), colors(other[pick]), difference(reference, other, pick, amplification)[0])
        for number, frame in enumerate(frames):
            sheet.paste(_picture(frame).resize(size, Image.LANCZOS), (left, MARGIN + number * row + LABEL))
            if column == 0:
                draw.text((left, MARGIN + number * row), labels[number], fill=TEXT, font=font(14))
            else:
                draw.text((left, MARGIN + number * row), f"frame {pick + 1}", fill=MUTED, font=font(13))
    bottom = MARGIN + len(labels) * row
    draw.text((MARGIN, bottom), summary(result), fill=TEXT, font=font(14))
    draw.text((MARGIN, bottom + LABEL), result["note"], fill=MUTED, font=font(12))
    return sheet


def draw_curves(result: dict) -> Image.Image:
    """PSNR, SSIM and FLIP over the measured frames, each on its own scale."""
    sheet = Image.new("RGB", CURVE_SIZE, BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN - 4), summary(result), fill=TEXT, font=font(14))
    height = (CURVE_SIZE[1] - 2 * MARGIN - 2 * LABEL) // len(CURVES)
    for number, (name, label, color) in enumerate(CURVES):
        top = MARGIN + LABEL + number * height
        box = (MARGIN + 130, top, CURVE_SIZE[0] - MARGIN, top + height - GAP)
        draw.rectangle(box, fill=PANEL)
        draw.text((MARGIN, top), label, fill=color, font=font(13))
        _draw_curve(draw, box, result["measured_frames"], result["per_frame"][name], color)
    last = result["measured_frames"][-1] + 1
    draw.text((MARGIN + 130, CURVE_SIZE[1] - LABEL), "frame 1", fill=MUTED, font=font(12))
    draw.text((CURVE_SIZE[0] - MARGIN, CURVE_SIZE[1] - LABEL), str(last), fill=MUTED, font=font(12), anchor="ra")
    return sheet


def _draw_curve(draw, box: tuple, frames: list[int], values: list, color) -> None:
    known = [value for value in values if value is not None]
    if not known:
        draw.text((box[0] + GAP, box[1] + GAP), "equal in every frame", fill=MUTED, font=font(13))
        return
    low, high = min(known), max(known)
    scale = (box[3] - box[1] - 2 * GAP) / ((high - low) or 1.0)
    length = (box[2] - box[0] - 2 * GAP) / max(frames[-1] - frames[0], 1)
    points = [
        (box[0] + GAP + (frame - frames[0]) * length, box[3] - GAP - (value - low) * scale)
        for frame, value in zip(frames, values, strict=True)
        if value is not None
    ]
    if len(points) > 1:
        draw.line(points, fill=color, width=2, joint="curve")
    for x, y in points:
        draw.ellipse((x - 2, y - 2, x + 2, y + 2), fill=color)
    left = MARGIN
    draw.text((left, box[1] + LABEL), f"{low:.4g} to {high:.4g}", fill=MUTED, font=font(12))


def _frame_size(width: int, height: int) -> tuple[int, int]:
    shrink = min(MOST_FRAME_WIDTH / width, MOST_FRAME_HEIGHT / height, 1.0)
    return max(round(width * shrink), 1), max(round(height * shrink), 1)


def _picture(frame: Tensor) -> Image.Image:
    return Image.fromarray((frame * 255).round().to(torch.uint8).numpy().astype(np.uint8))
