"""Low-bit attention in plain torch, tile by tile as the kernels do it: the specification.

Online softmax over key tiles of 128, one row of scores at a time in meaning, many rows at once in code:

    m'  = max(m, max_j s_j)                 running maximum, raised before a tile is converted
    alpha = 2^(m - m')
    P   = low-bit probabilities of s - m'   decoded, and the same numbers everywhere below
    O   = alpha O + P R                     R: quantized residual of the tile's values
    mu-part = alpha mu-part + r mu          r: row sum of P (paper, section 3.2)
    l   = alpha l + r

Scores are held in codes: units of 1/8 octave, ``8 log2(e)`` per natural-log unit (the spacing of E4M3 codes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import (
    CODES_PER_OCTAVE,
    E2M1_MAX,
    E4M3_MAX,
    LOG2_SCALE,
    decode_e4m3,
    encode_e4m3,
    expcast,
    quantize_nvfp4,
)
from ..group.blocks import BLOCK, expand_blocks
from ..quantize.operands import Operands4, Operands8

ROWS_PER_PASS = 4096
CODES_PER_NAT = CODES_PER_OCTAVE * math.log2(math.e)


@dataclass
class _RowState:
    """What the recurrence carries for a batch of query rows; the last dimension is 1 or D."""

    maximum: Tensor
    row_sum: Tensor
    output: Tensor
    mean_part: Tensor

    @classmethod
    def start(cls, shape: tuple[int, int, int], head_dim: int, device) -> _RowState:
        column = torch.zeros((*shape, 1), device=device)
        wide = torch.zeros((*shape, head_dim), device=device)
        return cls(torch.full_like(column, -math.inf), column, wide, wide.clone())

    def raise_maximum(self, tile_maximum: Tensor) -> None:
        """Rescale everything accumulated to the larger of the old maximum and the tile's."""
        maximum = torch.maximum(self.maximum, tile_maximum)
        alpha = torch.exp2((self.maximum - maximum) / CODES_PER_OCTAVE)
        self.maximum = maximum
        self.row_sum = self.row_sum * alpha
        self.output = self.output * alpha
        self.mean_part = self.mean_part * alpha

    def add(self, probabilities: Tensor, row_sum: Tensor, residual: Tensor, mean: Tensor) -> None:
        """Take in a tile: probabilities [.., BLOCK], row_sum [.., 1], residual [B, H, BLOCK, D], mean [B, H, 1, D]."""
        self.row_sum = self.row_sum + row_sum
        self.output = self.output + probabilities @ residual
        self.mean_part = self.mean_part + row_sum * mean


def attend8(operands: Operands8, scale: float, probabilities: str) -> Tensor:
    """8-bit attention on quantized operands.

    Args:
        scale: softmax scale.
        probabilities: "expcast" (E4M3 codes straight from the score) or "exp2" (exponential, then cast).

    Returns:
        [B, H, S_q, D] float32.
    """
    convert = _expcast_tile if probabilities == "expcast" else _exp2_tile
    keys = operands.k.numbers()
    key_scale = operands.k.scale.transpose(2, 3) * (scale * CODES_PER_NAT)
    residual = decode_e4m3(operands.residual)
    means = operands.means.float()

    def attend_rows(first: int, last: int) -> Tensor:
        queries = operands.q.numbers()[:, :, first:last]
        query_scale = operands.q.scale[:, :, first:last]
        state = _RowState.start(queries.shape[:3], queries.shape[3], queries.device)
        for tile, start in enumerate(range(0, keys.shape[2], BLOCK)):
            stop = start + BLOCK
            dots = queries @ keys[:, :, start:stop].transpose(2, 3)
            decoded = convert(state, dots * query_scale * key_scale[..., start:stop])
            row_sum = decoded.sum(-1, keepdim=True)
            state.add(decoded, row_sum, residual[:, :, start:stop], means[:, :, tile : tile + 1])
        return (state.output * operands.residual_scale + state.mean_part) / state.row_sum

    return _by_rows(attend_rows, operands.q.codes.shape[2])


def attend4(operands: Operands4, scale: float) -> Tensor:
    """4-bit attention on quantized operands: [B, H, S_q, D] float32.

    Row sums, for the denominator and for the means, are those of the probabilities *before* quantization: the
    residual has zero mean, so the mass that E2M1 loses would otherwise be missed only by the means.
    """
    keys = operands.k.dequantize()
    residual = operands.residual.dequantize().transpose(2, 3)
    means = operands.means.float()
    all_queries = operands.q.dequantize()
    all_query_means = expand_blocks(operands.q_means, all_queries.shape[2])

    def attend_rows(first: int, last: int) -> Tensor:
        queries = all_queries[:, :, first:last]
        query_means = all_query_means[:, :, first:last]
        state = _RowState.start(queries.shape[:3], queries.shape[3], queries.device)
        for tile, start in enumerate(range(0, keys.shape[2], BLOCK)):
            stop = start + BLOCK
            dots = queries @ keys[:, :, start:stop].transpose(2, 3)
            dots = dots + query_means @ operands.k_exact[:, :, start:stop].transpose(2, 3)
            exponentials, decoded = _nvfp4_tile(state, dots * (scale * CODES_PER_NAT))
            row_sum = exponentials.sum(-1, keepdim=True)
            state.add(decoded, row_sum, residual[:, :, start:stop], means[:, :, tile : tile + 1])
        return (state.output + state.mean_part) / state.row_sum

    return _by_rows(attend_rows, all_queries.shape[2])


def _by_rows(attend_rows, tokens: int) -> Tensor:
    return torch.cat(
        [attend_rows(first, min(first + ROWS_PER_PASS, tokens)) for first in range(0, tokens, ROWS_PER_PASS)],
        dim=2,
    )


def _expcast_tile(state: _RowState, scores: Tensor) -> Tensor:
    """Decoded ExpCast probabilities of a tile; the maximum is held on the integer code grid (method, section 3)."""
    state.raise_maximum(torch.ceil(scores.amax(-1, keepdim=True)))
    return decode_e4m3(expcast((scores - state.maximum) / CODES_PER_OCTAVE))


def _exp2_tile(state: _RowState, scores: Tensor) -> Tensor:
    """Decoded probabilities of a tile by exponential and cast, scaled by 2^8."""
    state.raise_maximum(scores.amax(-1, keepdim=True))
    return decode_e4m3(encode_e4m3(torch.exp2((scores - state.maximum) / CODES_PER_OCTAVE + LOG2_SCALE)))


def _nvfp4_tile(state: _RowState, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Exponentials of a tile and their NVFP4 values; a row maximum is 448 x 6, so group scales use all of UE4M3."""
    state.raise_maximum(scores.amax(-1, keepdim=True))
    exponentials = torch.exp2((scores - state.maximum) / CODES_PER_OCTAVE) * (E4M3_MAX * E2M1_MAX)
    one = torch.ones((), device=scores.device)
    return exponentials, quantize_nvfp4(exponentials, one).dequantize()
