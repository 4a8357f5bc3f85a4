"""What every painter of clips shares: mixing colors, edges one pixel wide, places that come back."""

from __future__ import annotations

import torch
from torch import Tensor

TIME_PER_FRAME = 1.0 / 16.0


def mix(low: Tensor, high: Tensor, share: Tensor) -> Tensor:
    """``low`` where ``share`` is 0, ``high`` where it is 1."""
    return low + (high - low) * share


def edge(distance: Tensor, pixel: Tensor) -> Tensor:
    """1 inside (negative distance), 0 outside, one pixel wide between."""
    return (0.5 - distance / pixel).clamp(0.0, 1.0)


def wrap(value: Tensor, reach: float | Tensor) -> Tensor:
    """Into [-reach, reach): what leaves on one side comes back on the other."""
    return torch.remainder(value + reach, 2.0 * reach) - reach


def fold(value: Tensor) -> Tensor:
    """Into [-1, 1]: what reaches one side turns back."""
    return 1.0 - (torch.remainder(value + 1.0, 4.0) - 2.0).abs()


def pixels(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Centers of a frame's pixels in half heights from its middle: x [W], y [H]."""
    step = 2.0 / height
    x = (torch.arange(width, device=device) + 0.5) * step - width / height
    y = (torch.arange(height, device=device) + 0.5) * step - 1.0
    return x, y


def between(ranges: Tensor, random: torch.Generator) -> Tensor:
    """A number from each of ``ranges`` [..., 2]; ``random`` is a CPU generator, so that devices agree."""
    low, high = ranges.unbind(-1)
    return low + (high - low) * torch.rand(low.shape, generator=random)
