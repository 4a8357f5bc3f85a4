"""Two clips measured against each other: numbers per frame and over all, ready for JSON."""

from __future__ import annotations

import math

from torch import Tensor

from . import metrics
from .flip import flip
from .host import stop_if_interrupted

NOTE = "Another sample is not a worse sample: judge quality over several seeds, not by the distance to one render."
PEAK = 1.0
DECIMALS = 5


def check_clips(reference: Tensor, other: Tensor) -> None:
    """Two IMAGE batches of one size.

    Raises:
        ValueError: they are not; the message names both shapes.
    """
    shapes = f"reference {list(reference.shape)} and other {list(other.shape)}"
    named = "[frames, height, width, channels]"
    if reference.ndim != 4 or other.ndim != 4 or min(reference.shape[-1], other.shape[-1]) < 3:
        raise ValueError(f"VC Attention Compare: expected two image batches {named} in color, got {shapes}")
    if reference.shape[:3] != other.shape[:3]:
        raise ValueError(f"VC Attention Compare: {named} must be equal but for the channels, got {shapes}")
    frames, height, width, _ = reference.shape
    if frames < 1 or min(height, width) < metrics.WINDOW:
        least = metrics.WINDOW
        raise ValueError(f"VC Attention Compare: expected a frame or more of {least} x {least} or more, got {shapes}")


def spread(frames: int, most: int) -> list[int]:
    """At most ``most`` frame numbers, evenly over the clip, with its first and last."""
    count = min(max(most, 1), frames)
    if count == 1:
        return [0]
    return sorted({round(index * (frames - 1) / (count - 1)) for index in range(count)})


def colors(frame: Tensor) -> Tensor:
    """The three colors of one frame, float32 from 0 to 1; what is not finite becomes black."""
    return frame[..., :3].detach().cpu().float().nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0)


def compare(reference: Tensor, other: Tensor, picks: list[int]) -> dict:
    """PSNR, SSIM and FLIP of the picked frames.

    PSNR over all is that of the mean squared error, SSIM and FLIP over all are means of the frames. PSNR of equal
    frames is infinite, which JSON cannot hold: it is None.
    """
    per_frame = {"psnr": [], "ssim": [], "flip": []}
    errors = []
    for pick in picks:
        stop_if_interrupted()
        first, second = colors(reference[pick]), colors(other[pick])
        a, b = first.numpy(), second.numpy()
        errors.append(float(((first.double() - second.double()) ** 2).mean()))
        per_frame["psnr"].append(metrics.psnr(a, b, PEAK))
        per_frame["ssim"].append(metrics.ssim_frame(a, b, PEAK))
        per_frame["flip"].append(float(flip(first.permute(2, 0, 1), second.permute(2, 0, 1)).mean()))
    error = sum(errors) / len(errors)
    whole = {
        "psnr": math.inf if error == 0 else 10 * math.log10(PEAK**2 / error),
        "ssim": sum(per_frame["ssim"]) / len(picks),
        "flip": sum(per_frame["flip"]) / len(picks),
    }
    frames, height, width, _ = reference.shape
    return {
        "version": 1,
        "frames": frames,
        "height": height,
        "width": width,
        **{name: _rounded(value) for name, value in whole.items()},
        "equal": error == 0,
        "measured_frames": picks,
        "per_frame": {name: [_rounded(value) for value in values] for name, values in per_frame.items()},
        "most_different_frame": picks[max(range(len(picks)), key=errors.__getitem__)],
        "not_finite": {"reference": _not_finite(reference, picks), "other": _not_finite(other, picks)},
        "note": NOTE,
    }


def summary(result: dict) -> str:
    """The numbers in one line."""
    ratio = "equal" if result["equal"] else f"PSNR {result['psnr']:.2f} dB"
    measured, frames = len(result["measured_frames"]), result["frames"]
    of_them = f"{frames} frames" if measured == frames else f"{measured} of {frames} frames"
    line = f"{ratio} · SSIM {result['ssim']:.4f} · FLIP {result['flip']:.4f} · {of_them}"
    broken = sum(result["not_finite"].values())
    return f"{line} · {broken} values are not finite" if broken else line


def _rounded(value: float) -> float | None:
    return round(value, DECIMALS) if math.isfinite(value) else None


def _not_finite(clip: Tensor, picks: list[int]) -> int:
    return sum(int((~clip[pick].isfinite()).sum()) for pick in picks)
