"""The arithmetic of csrc/attention_precise_sm90.cu in plain torch, on the same operands.

Exact where the kernel is exact: scores and the offsets that make exponents of them. Exponentials and sums differ in
the last bits of float32, so outputs agree to about 1e-4 before they are rounded; where exponentials lie on a tie
of the 16-bit probabilities, rows over a few keys differ by a step of those.

The maximum is stale: what is accumulated stands relative to a reference, a whole number of octaves, that is raised
only when a probability would pass 2^LIMIT. So raising it changes no bit of a probability that is not subnormal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..group.blocks import BLOCK
from ..quantize.precise import PreciseOperands

TOP = 4  # octaves: where a new reference puts the row's largest probability, rounded up
LIMIT = 15  # octaves: a probability above makes a new reference; a half reaches 16
MAGIC = 1.5 * 2**23  # scores are floats of this binade, see the kernel


def attend_precise(operands: PreciseOperands, q_tokens: int) -> Tensor:
    """Attention of the operands: float32 [BH, q_tokens, 128]."""
    return _Rows(operands, q_tokens).run()[:, :q_tokens]


class _Rows:
    """The recurrence over key tiles for all query rows of all heads."""

    def __init__(self, operands: PreciseOperands, q_tokens: int):
        self.operands = operands
        self.v = operands.v.flatten(0, 1)
        heads, rows = operands.q_scale.shape
        device = operands.q8.device
        real = (torch.arange(rows, device=device) < q_tokens)[None, :]
        self.q = operands.q8.float() * real[..., None]
        self.octaves = torch.where(real, operands.q_scale, torch.ones_like(operands.q_scale)) / 2048
        self.reference = torch.full_like(self.octaves, -torch.inf)
        self.output = torch.zeros(heads, rows, self.v.shape[2], dtype=torch.float32, device=device)
        self.row_sum = torch.zeros_like(self.octaves)

    def run(self) -> Tensor:
        for tile in range(self.operands.k8.shape[1] // BLOCK):
            keys = slice(tile * BLOCK, min((tile + 1) * BLOCK, self.v.shape[1]))
            scores = self.q @ self.operands.k8[:, keys].float().transpose(1, 2)
            slope = self.octaves * self.operands.k_block_scale[:, tile, None]
            self._raise_references(scores.amax(-1) * slope)
            exponentials = torch.exp2(self._exponents(scores, slope))
            self.output += exponentials.to(self.v.dtype).float() @ self.v[:, keys].float()
            self.row_sum += exponentials.sum(-1)
        return self.output / self.row_sum[..., None]

    def _exponents(self, scores: Tensor, slope: Tensor) -> Tensor:
        """One multiply-add in float32; float64 holds what it rounds."""
        offset = (MAGIC * slope.double() + self.reference).float()
        return ((scores.double() + MAGIC) * slope[..., None].double() - offset[..., None].double()).float()

    def _raise_references(self, highest: Tensor) -> None:
        raised = torch.where(highest > self.reference + LIMIT, highest.ceil() - TOP, self.reference)
        factor = torch.exp2(self.reference - raised)
        self.reference = raised
        self.output *= factor[..., None]
        self.row_sum *= factor
