"""The reference implementation of the attention call: quantize, then the tile-by-tile recurrence."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arch import EIGHT_BIT, PRECISE
from ..errors import UnsupportedCall
from ..quantize.reference import quantize4, quantize8, quantize8_precise
from .reference import attend4, attend8, attend8_precise
from .settings import Settings
from .validation import require_finite


def run(
    q: Tensor, k: Tensor, v: Tensor, permutation: Tensor | None, scale: float, settings: Settings, out: Tensor
) -> None:
    """Write attention of q [B, H, S_q, D] and k, v [B, H, S_kv, D] to ``out`` [B, H, S_q, D]; any strides.

    Raises:
        UnsupportedCall: q, k or v holds NaN or infinity, or numbers too large to quantize in float32.
    """
    require_finite({"q": q, "k": k, "v": v})
    operands = quantize(q, k, v, permutation, settings)
    if settings.mode == EIGHT_BIT:
        output = attend8(operands, scale, settings.probabilities)
    elif settings.mode == PRECISE:
        output = attend8_precise(operands, scale)
    else:
        output = attend4(operands, scale)
    if not bool(torch.isfinite(output).all()):
        raise UnsupportedCall({"reference": "q, k or v holds numbers too large for low-bit scales in float32"})
    out.copy_(output)


def quantize(q: Tensor, k: Tensor, v: Tensor, permutation: Tensor | None, settings: Settings):
    """Operands of the call in its mode: Operands8, Operands8Precise or Operands4."""
    if settings.mode == EIGHT_BIT:
        return quantize8(q, k, v, permutation, settings.qk_format, settings.demean)
    if settings.mode == PRECISE:
        return quantize8_precise(q, k, v)
    return quantize4(q, k, v, permutation, settings.demean, settings.own_block)
