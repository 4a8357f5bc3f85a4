"""LDR-FLIP: how large the difference of two pictures looks to someone who flips between them, 0 to 1 a pixel.

Andersson et al., "FLIP: A Difference Evaluator for Alternating Images", 2020. Written from the paper: colors are
filtered as the eye does at a given distance, compared in a space of equal color steps, and weighted up where edges
and points differ. Needs no network and no download. Frames are [3, height, width] tensors of sRGB from 0 to 1.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# A 4K monitor of 0.7 m width seen from 0.7 m, as in the paper.
PIXELS_PER_DEGREE = 67.0
COLOR_EXPONENT, CUT, CUT_ERROR = 0.7, 0.4, 0.95  # q_c, p_c, p_t
FEATURE_EXPONENT, FEATURE_WIDTH = 0.5, 0.082  # q_f, w in degrees

# Contrast sensitivity of each opponent channel: pairs (a, b) of a * sqrt(pi / b) * exp(-pi^2 d^2 / b), d in degrees.
SENSITIVITY = (
    ((1.0, 0.0047),),
    ((1.0, 0.0053),),
    ((34.1, 0.04), (13.5, 0.025)),
)
TO_XYZ = torch.tensor(
    [
        [10135552 / 24577794, 8788810 / 24577794, 4435075 / 24577794],
        [2613072 / 12288897, 8788810 / 12288897, 887015 / 12288897],
        [1425312 / 73733382, 8788810 / 73733382, 70074185 / 73733382],
    ],
    dtype=torch.float32,
)
TO_RGB = torch.linalg.inv(TO_XYZ.double()).float()
WHITE = TO_XYZ.sum(1)


def flip(reference: Tensor, other: Tensor, pixels_per_degree: float = PIXELS_PER_DEGREE) -> Tensor:
    """The map of visible differences [height, width]; its mean is the usual single number."""
    first, second = (_opponent(_linear(picture.float())) for picture in (reference, other))
    color = _redistributed(
        _hyab(_seen(first, pixels_per_degree), _seen(second, pixels_per_degree)) ** COLOR_EXPONENT,
        _largest_color_error(),
    )
    feature = _feature_difference(first[0], second[0], pixels_per_degree)
    return color ** (1 - feature)


def _linear(srgb: Tensor) -> Tensor:
    return torch.where(srgb > 0.04045, ((srgb + 0.055) / 1.055) ** 2.4, srgb / 12.92)


def _mixed(matrix: Tensor, channels: Tensor) -> Tensor:
    return torch.einsum("ij,jhw->ihw", matrix.to(channels.device), channels)


def _opponent(rgb: Tensor) -> Tensor:
    """YyCxCz: brightness, red against green, blue against yellow."""
    x, y, z = _mixed(TO_XYZ, rgb) / WHITE.to(rgb.device)[:, None, None]
    return torch.stack((116 * y - 16, 500 * (x - y), 200 * (y - z)))


def _rgb_of_opponent(opponent: Tensor) -> Tensor:
    y = (opponent[0] + 16) / 116
    xyz = torch.stack((opponent[1] / 500 + y, y, y - opponent[2] / 200)) * WHITE.to(y.device)[:, None, None]
    return _mixed(TO_RGB, xyz).clamp(0, 1)


def _hunt_lab(rgb: Tensor) -> Tensor:
    """CIELab, its colors less vivid in the dark."""
    relative = _mixed(TO_XYZ, rgb) / WHITE.to(rgb.device)[:, None, None]
    knee = 6 / 29
    root = torch.where(relative > knee**3, relative.clamp_min(1e-12) ** (1 / 3), relative / (3 * knee**2) + 4 / 29)
    lightness = 116 * root[1] - 16
    a, b = 500 * (root[0] - root[1]), 200 * (root[1] - root[2])
    return torch.stack((lightness, 0.01 * lightness * a, 0.01 * lightness * b))


def _hyab(first: Tensor, second: Tensor) -> Tensor:
    """City blocks in lightness, straight line in color."""
    gap = first - second
    return gap[0].abs() + torch.hypot(gap[1], gap[2])


def _largest_color_error() -> float:
    """Green against blue, the two that lie farthest apart."""
    green, blue = (
        _hunt_lab(torch.tensor(color, dtype=torch.float32).reshape(3, 1, 1)) for color in ((0, 1, 0), (0, 0, 1))
    )
    return float(_hyab(green, blue)) ** COLOR_EXPONENT


def _redistributed(error: Tensor, largest: float) -> Tensor:
    """Errors up to 0.4 of the largest fill 0 to 0.95; what is beyond fills the rest."""
    cut = CUT * largest
    return torch.where(error < cut, CUT_ERROR / cut * error, CUT_ERROR + (error - cut) / (largest - cut) * 0.05)


def _seen(opponent: Tensor, pixels_per_degree: float) -> Tensor:
    """What is left of the detail at that distance, as Hunt-adjusted CIELab."""
    radius = math.ceil(3 * math.sqrt(0.04 / (2 * math.pi**2)) * pixels_per_degree)
    degrees = torch.arange(-radius, radius + 1, dtype=torch.float32, device=opponent.device) / pixels_per_degree
    channels = []
    for channel, terms in zip(opponent, SENSITIVITY, strict=True):
        kernels = [torch.exp(-(math.pi**2) * degrees**2 / b) for _, b in terms]
        weights = [a * math.sqrt(math.pi / b) for a, b in terms]
        whole = sum(weight * kernel.sum() ** 2 for weight, kernel in zip(weights, kernels, strict=True))
        parts = zip(weights, kernels, strict=True)
        channels.append(sum(weight / whole * _filtered(channel, kernel, kernel) for weight, kernel in parts))
    return _hunt_lab(_rgb_of_opponent(torch.stack(channels)))


def _feature_difference(first: Tensor, second: Tensor, pixels_per_degree: float) -> Tensor:
    """Where one picture has an edge or a point that the other has not, 0 to 1."""
    sigma = 0.5 * FEATURE_WIDTH * pixels_per_degree
    radius = math.ceil(3 * sigma)
    offset = torch.arange(-radius, radius + 1, dtype=torch.float32, device=first.device)
    bell = torch.exp(-(offset**2) / (2 * sigma**2))
    edge, point = _balanced(-offset * bell), _balanced((offset**2 / sigma**2 - 1) * bell)
    bell = bell / bell.sum()
    gaps = [(_strength(first, kernel, bell) - _strength(second, kernel, bell)).abs() for kernel in (edge, point)]
    return (torch.maximum(*gaps) / math.sqrt(2)).clamp(0, 1) ** FEATURE_EXPONENT


def _balanced(kernel: Tensor) -> Tensor:
    """Positive weights add up to 1 and negative ones to -1."""
    return torch.where(kernel > 0, kernel / kernel.clamp_min(0).sum(), kernel / -kernel.clamp_max(0).sum())


def _strength(brightness: Tensor, kernel: Tensor, bell: Tensor) -> Tensor:
    normalized = (brightness + 16) / 116
    return torch.hypot(_filtered(normalized, bell, kernel), _filtered(normalized, kernel, bell))


def _filtered(channel: Tensor, vertical: Tensor, horizontal: Tensor) -> Tensor:
    """Correlation with the product of two kernels; the border is repeated outwards.

    As sums of shifted pictures: a convolution of one channel has no fast path on the CPU.
    """
    radius, (height, width) = len(vertical) // 2, channel.shape
    padded = F.pad(channel[None, None], (radius,) * 4, mode="replicate")[0, 0]
    rows = torch.zeros(height, width + 2 * radius, dtype=channel.dtype, device=channel.device)
    for start, weight in _felt(vertical):
        rows.add_(padded[start : start + height], alpha=weight)
    filtered = torch.zeros_like(channel)
    for start, weight in _felt(horizontal):
        filtered.add_(rows[:, start : start + width], alpha=weight)
    return filtered


def _felt(kernel: Tensor) -> list[tuple[int, float]]:
    """Taps that are more than float32's rounding; the narrow kernels have few."""
    return [(start, weight) for start, weight in enumerate(kernel.tolist()) if abs(weight) > 1e-9]
