"""The arithmetic of csrc/attention_precise_sm90.cu in plain torch, on the same operands.

Exact where the kernel is exact: scores, maxima of tiles, probabilities and their sums. Weights of tiles and sums over
tiles differ in the last bits of float32, so outputs agree to about 1e-4 before they are rounded.

What differs from the general reference (attend/reference.py): scores are cut to 16 bits, exp2 is a polynomial in half
arithmetic, and what is accumulated stands relative to a reference that is raised only when a tile's maximum is more
than 8 octaves above it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..group.blocks import BLOCK
from ..quantize.hopper import HEAD_DIM, decoded_means, in_token_order
from ..quantize.precise import PreciseOperands

OCTAVES = 9.2  # a probability this far below the tile's maximum is 0
HEADROOM, WEIGHT_SHIFT = 8, 8
PADDING_SCORE = -16384
# 254^(1/8) 2^(OCTAVES/8 (t - 1)) for t in 0..1, highest power first; all are half numbers.
CUBIC = (0.11065673828125, 0.265869140625, 0.72119140625, 0.90087890625)


def attend_precise(operands: PreciseOperands, q_tokens: int, *, means: bool = True) -> Tensor:
    """Attention of the operands: float32 [BH, q_tokens, 128]."""
    return _Rows(operands, q_tokens).run(means)[:, :q_tokens]


def probability(t: Tensor) -> Tensor:
    """Whole numbers 0..254, about ``254 * 2^(9.2 (t - 1))``, from half numbers t in 0..1; within 0.6 % and rounding."""
    y = torch.full_like(t, CUBIC[0])
    for coefficient in CUBIC[1:]:
        y = _half(y * t + coefficient)
    y = _half(y * y)
    y = _half(y * y)
    return (y * y).round()


def _half(x: Tensor) -> Tensor:
    """Float64 rounded to half: one operation of half arithmetic, whose exact result float64 holds."""
    return x.half().double()


class _Rows:
    """The recurrence over key tiles for all query rows of all heads."""

    def __init__(self, operands: PreciseOperands, q_tokens: int):
        self.operands = operands
        heads, rows = operands.q_scale.shape
        device = operands.q8.device
        real = (torch.arange(rows, device=device) < q_tokens)[None, :]
        self.q = operands.q8.float() * real[..., None]
        self.scale = torch.where(real, operands.q_scale, torch.ones_like(operands.q_scale))
        self.reference = torch.full_like(self.scale, -torch.inf)
        self.output = torch.zeros(heads, rows, HEAD_DIM, dtype=torch.float32, device=device)
        self.row_sum = torch.zeros_like(self.scale)

    def run(self, means: bool) -> Tensor:
        values, stored = in_token_order(self.operands.v8.float()), decoded_means(self.operands)
        for tile in range(self.operands.k8.shape[1] // BLOCK):
            maximum, probabilities = self._probabilities(tile)
            self._raise_references(maximum)
            weight = torch.exp2(maximum - self.reference - WEIGHT_SHIFT)
            rounded = (weight * probabilities.sum(-1)).half().float()
            product = probabilities @ values[:, tile * BLOCK : (tile + 1) * BLOCK]
            self.output += weight[..., None] * self.operands.v_block_scale[:, tile, None] * product
            if means:
                self.output += rounded[..., None] * stored[:, tile, None]
            self.row_sum += rounded
        return self.output / self.row_sum[..., None] * self.operands.v_scale[:, None]

    def _probabilities(self, tile: int) -> tuple[Tensor, Tensor]:
        """Octaves at which a probability is 254 (the maximum's is that or a little less), and [BH, rows, BLOCK]."""
        place = torch.arange(tile * BLOCK, (tile + 1) * BLOCK, device=self.q.device)
        padding = place >= self.operands.kv_length
        keys = self.operands.k8[:, tile * BLOCK : (tile + 1) * BLOCK].float() * ~padding[:, None]
        scores = torch.where(padding, PADDING_SCORE, (self.q @ keys.transpose(1, 2)).div(256).floor())
        highest = scores.amax(-1)
        octaves = self.scale * self.operands.k_block_scale[:, tile, None] * 0.125  # per 256 units
        slope = (octaves * (1024 / OCTAVES)).clamp_max(1024).half().float()
        u_max = (1024 / slope).floor()
        u = (scores + (u_max - highest)[..., None]).clamp_min(0).double()
        t = _half(u * slope[..., None].double() / 1024)
        below_one = OCTAVES * (1 - u_max * slope / 1024)
        return (highest + 0.5) * octaves + below_one, probability(t).float()

    def _raise_references(self, maximum: Tensor) -> None:
        raised = torch.where(maximum > self.reference + HEADROOM, maximum.ceil(), self.reference)
        factor = torch.exp2(self.reference - raised)
        self.reference = raised
        self.output *= factor[..., None]
        self.row_sum *= factor
