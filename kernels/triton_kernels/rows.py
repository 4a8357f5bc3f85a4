"""q, k, v and the output in memory: [B, heads, tokens, D] of any strides, rows in words of 8 elements."""

from typing import NamedTuple

import triton
import triton.language as tl

from .common import WORD


class Rows(NamedTuple):
    """A tensor [B, heads, tokens, D], last dimension contiguous.

    Attributes:
        p_first: its first element.
        stride_b, stride_h, stride_s: int64, in words of 8 elements, so that Triton sees that rows are 16-byte aligned.
    """

    p_first: tl.tensor
    heads: tl.tensor
    tokens: tl.tensor
    stride_b: tl.tensor
    stride_h: tl.tensor
    stride_s: tl.tensor


@triton.jit
def rows_at(x, i_head, token):
    """Pointers to the rows ``token`` [N] of head ``i_head``, below B * heads."""
    start = i_head // x.heads * x.stride_b + i_head % x.heads * x.stride_h
    return x.p_first + (start + token.to(tl.int64) * x.stride_s) * WORD


@triton.jit
def load_rows(x, i_head, token, mask, D: tl.constexpr, FIRST: tl.constexpr = 0):
    """[N, D], channels from FIRST on, of the rows ``token`` [N] in their own dtype; outside the mask they are zero."""
    p_row = rows_at(x, i_head, token) + FIRST
    return tl.load(p_row[:, None] + tl.arange(0, D)[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def load_columns(x, i_head, token, mask, D: tl.constexpr):
    """[D, N]: what `load_rows` loads, transposed on the way to the tensor cores."""
    p_column = rows_at(x, i_head, token)
    return tl.load(p_column[None, :] + tl.arange(0, D)[:, None], mask=mask[None, :], other=0.0)
