"""Low-bit attention in plain torch, tile by tile as the kernels do it: the specification.

Online softmax over key tiles of 128, one row of scores at a time in meaning, many rows at once in code:

    m'  = max(m, max_j s_j)                 running maximum, raised before a tile is converted
    alpha = 2^(m - m')
    P   = low-bit probabilities of s - m'   decoded, and the same numbers everywhere below
    O   = alpha O + P R                     R: quantized residual of the tile's values
    mu-part = alpha mu-part + r mu          r: row sum of P (paper, section 3.2)
    l   = alpha l + r

Scores are held in codes: units of 1/8 octave, ``8 log2(e)`` per natural-log unit (the spacing of E4M3 codes).
Where the keys of a query's own block are attended to in 16 bit (own_block.py), the recurrence starts with them as seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
from ..quantize.operands import Operands4, Operands8, Operands8Precise
from .own_block import attend_own_block, is_own_key

ROWS_PER_PASS = 4096
CODES_PER_NAT = CODES_PER_OCTAVE * math.log2(math.e)
NVFP4_TOP = E4M3_MAX * E2M1_MAX  # a row maximum, so that group scales use all of UE4M3


@dataclass
class _RowState:
    """What the recurrence carries for a batch of query rows; the last dimension is 1 or D."""

    maximum: Tensor
    row_sum: Tensor
    output: Tensor
    mean_part: Tensor

    @classmethod
    def start(cls, queries: Tensor) -> _RowState:
        """Nothing seen yet, for ``queries`` [B, H, rows, D] in float32."""
        wide = torch.zeros_like(queries)
        column = wide[..., :1]
        return cls(torch.full_like(column, -math.inf), column, wide, wide)

    @classmethod
    def seen(cls, log_sum: Tensor, output: Tensor) -> _RowState:
        """After keys attended to elsewhere: log2 of their sum, [B, H, rows, 1], and their output, [B, H, rows, D]."""
        row_sum = torch.full_like(log_sum, NVFP4_TOP)
        return cls(log_sum * CODES_PER_OCTAVE, row_sum, torch.zeros_like(output), output * row_sum)

    def raise_maximum(self, tile_maximum: Tensor) -> None:
        """Rescale everything accumulated to the larger of the old maximum and the tile's."""
        maximum = torch.maximum(self.maximum, tile_maximum)
        alpha = exp2((self.maximum - maximum) / CODES_PER_OCTAVE)
        self.maximum = maximum
        self.row_sum = self.row_sum * alpha
        self.output = self.output * alpha
        self.mean_part = self.mean_part * alpha

    def add(self, row_sum: Tensor, weighted_residual: Tensor, mean: Tensor | None) -> None:
        """Take in a tile: row_sum [B, H, rows, 1], weighted_residual [B, H, rows, D], mean [B, H, 1, D]."""
        self.row_sum = self.row_sum + row_sum
        self.output = self.output + weighted_residual
        if mean is not None:
            self.mean_part = self.mean_part + row_sum * mean.float()


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product in float64, rounded to float32.

    Products of two numbers of 8 or fewer bits add up exactly in float64, so that the result depends neither on the
    order of additions nor on batch, strides or matrix library.
    """
    return (a.double() @ b.double()).float()


def exp2(x: Tensor) -> Tensor:
    """``2^x`` in float64, rounded to float32: torch's float32 one may differ in the last bit with the position."""
    return torch.exp2(x.double()).float()


def attend8(operands: Operands8, scale: float, probabilities: str) -> Tensor:
    """8-bit attention on quantized operands.

    Args:
        scale: softmax scale.
        probabilities: "expcast" (E4M3 codes straight from the score) or "exp2" (exponential, then cast).

    Returns:
        [B, H, S_q, D] float32.
    """
    convert = _expcast_tile if probabilities == "expcast" else _exp2_tile
    keys = operands.k.numbers().transpose(2, 3)
    key_scale = operands.k.scale.transpose(2, 3) * (scale * CODES_PER_NAT)
    residual = decode_e4m3(operands.residual)

    def attend_rows(rows: slice) -> Tensor:
        queries = operands.q.numbers()[:, :, rows]
        query_scale = operands.q.scale[:, :, rows]
        state = _RowState.start(queries)
        for tile, mean in _tiles(keys.shape[3], operands.means):
            decoded = convert(state, product(queries, keys[..., tile]) * query_scale * key_scale[..., tile])
            state.add(decoded.sum(-1, keepdim=True), product(decoded, residual[:, :, tile]), mean)
        return (state.output * operands.residual_scale + state.mean_part) / state.row_sum

    return _by_rows(attend_rows, operands.q.codes.shape[2])


def attend8_precise(operands: Operands8Precise, scale: float) -> Tensor:
    """Precise 8-bit attention on quantized operands: [B, H, S_q, D] float32.

    Probabilities are rounded to the dtype of the values; the denominator adds them before that.
    """
    keys = operands.k.numbers().transpose(2, 3)
    key_scale = operands.k.scale.transpose(2, 3) * (scale * CODES_PER_NAT)

    def attend_rows(rows: slice) -> Tensor:
        queries = operands.q.numbers()[:, :, rows]
        query_scale = operands.q.scale[:, :, rows]
        state = _RowState.start(queries)
        for tile, _ in _tiles(keys.shape[3], None):
            scores = product(queries, keys[..., tile]) * query_scale * key_scale[..., tile]
            state.raise_maximum(scores.amax(-1, keepdim=True))
            exponentials = exp2((scores - state.maximum) / CODES_PER_OCTAVE)
            row_sum = exponentials.sum(-1, keepdim=True, dtype=torch.float64).float()
            state.add(row_sum, product(exponentials.to(operands.v.dtype), operands.v[:, :, tile]), None)
        return state.output / state.row_sum

    return _by_rows(attend_rows, operands.q.codes.shape[2])


def attend4(operands: Operands4, scale: float) -> Tensor:
    """4-bit attention on quantized operands: [B, H, S_q, D] float32.

    Where block means were removed, the row sums, for the denominator and for the means, are those of the
    probabilities *before* quantization: the residual has zero mean, so the mass that E2M1 loses would otherwise be
    missed by the means alone.
    """
    all_queries = operands.q.numbers()
    keys = operands.k.numbers().transpose(2, 3)
    exact_keys = operands.k_exact.transpose(2, 3)
    pair_scale = operands.q.scale * operands.k.scale
    query_means = expand_blocks(operands.q_means, all_queries.shape[2])
    residual = operands.residual.numbers().transpose(2, 3)
    residual_scale = operands.residual.scale.transpose(2, 3)

    def attend_rows(rows: slice) -> Tensor:
        queries = all_queries[:, :, rows]
        own = operands.own is not None
        state = _RowState.seen(*attend_own_block(operands, scale, rows)) if own else _RowState.start(queries)
        for tile, mean in _tiles(keys.shape[3], operands.means):
            scores = product(queries, keys[..., tile]) * pair_scale
            scores = (scores + product(query_means[:, :, rows], exact_keys[..., tile])) * (scale * CODES_PER_NAT)
            if own:
                scores = scores.masked_fill(is_own_key(operands, rows, tile), -math.inf)
            exponentials, decoded = _nvfp4_tile(state, scores)
            weights = decoded if mean is None else exponentials
            row_sum = weights.sum(-1, keepdim=True, dtype=torch.float64).float()
            state.add(row_sum, product(decoded, residual[:, :, tile]), mean)
        return (state.output * residual_scale + state.mean_part) / state.row_sum

    return _by_rows(attend_rows, all_queries.shape[2])


def _tiles(tokens: int, means: Tensor | None) -> Iterator[tuple[slice, Tensor | None]]:
    """Key tiles of 128 and the [B, H, 1, D] mean of each."""
    for index, start in enumerate(range(0, tokens, BLOCK)):
        yield slice(start, start + BLOCK), None if means is None else means[:, :, index : index + 1]


def _by_rows(attend_rows, tokens: int) -> Tensor:
    starts = range(0, tokens, ROWS_PER_PASS)
    return torch.cat([attend_rows(slice(start, start + ROWS_PER_PASS)) for start in starts], dim=2)


def _expcast_tile(state: _RowState, scores: Tensor) -> Tensor:
    """Decoded ExpCast probabilities of a tile; the maximum is held on the integer code grid (method, section 3)."""
    state.raise_maximum(torch.ceil(scores.amax(-1, keepdim=True)))
    return decode_e4m3(expcast((scores - state.maximum) / CODES_PER_OCTAVE))


def _exp2_tile(state: _RowState, scores: Tensor) -> Tensor:
    """Decoded probabilities of a tile by exponential and cast, scaled by 2^8."""
    state.raise_maximum(scores.amax(-1, keepdim=True))
    return decode_e4m3(encode_e4m3(exp2((scores - state.maximum) / CODES_PER_OCTAVE + LOG2_SCALE)))


def _nvfp4_tile(state: _RowState, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Exponentials of a tile and their NVFP4 values."""
    state.raise_maximum(scores.amax(-1, keepdim=True))
    exponentials = exp2((scores - state.maximum) / CODES_PER_OCTAVE) * NVFP4_TOP
    one = torch.ones((), dtype=torch.float32, device=scores.device)
    return exponentials, quantize_nvfp4(exponentials, one).dequantize()
