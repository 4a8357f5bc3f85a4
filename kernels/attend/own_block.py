"""The 16-bit part of the 4-bit mode in plain torch: every query attends to the keys of its own block exactly.

A query and its neighbours in the sequence are alike, so that much of a row's weight lies in its own 128 keys. Their
scores in octaves are

    s_ij = c (q_i (k_j - k_i) + q'_i (k_i - mean of k))             c = scale log2(e)

with q' the query as the 4-bit scores see it: rounded, plus its block mean. The first term is exact. The second puts the
row's own key where the 4-bit scores would put it: what rounding a query moves, it moves alike for keys that are alike,
so that near and far scores are off by about the same, which a softmax does not see.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..formats import NVFP4
from ..group.blocks import BLOCK, expand_blocks
from ..quantize.operands import Operands4
from ..quantize.rotation import rotate


def attend_own_block(operands: Operands4, scale: float, rows: slice) -> tuple[Tensor, Tensor]:
    """Attention of some queries to the keys of their own blocks; probabilities are rounded to the dtype of v.

    Args:
        scale: softmax scale.
        rows: queries, from the first of a block to the last of a block or of the sequence.

    Returns:
        log2 of the sum of the exponentials, [B, H, rows, 1], and the output, [B, H, rows, D]; both float32.
    """
    own = operands.own
    q, k, v = (_blocks(x[:, :, rows]) for x in (own.q, own.k, own.v))
    seen = rotate(_as_seen(operands, rows))
    centred = k.double() - own.k.mean(2, dtype=torch.float64)[:, :, None, None]
    products = q.double() @ k.double().transpose(3, 4)
    own_key = (_blocks(seen).double() * centred).sum(4, keepdim=True)
    scores = (products - products.diagonal(dim1=3, dim2=4).unsqueeze(4) + own_key) * (scale * math.log2(math.e))
    real = _blocks(torch.ones_like(own.q[:1, :1, rows, :1], dtype=torch.bool)).transpose(3, 4)
    scores = scores.masked_fill(~real, -math.inf)
    maximum = scores.amax(4, keepdim=True)
    exponentials = torch.exp2(scores - maximum)
    row_sum = exponentials.sum(4, keepdim=True)
    output = exponentials.to(v.dtype).double() @ v.double() / row_sum
    count = seen.shape[2]
    return tuple(x.flatten(2, 3)[:, :, :count].float() for x in (maximum + torch.log2(row_sum), output))


def is_own_key(operands: Operands4, rows: slice, keys: slice) -> Tensor:
    """Bool, broadcastable to [B, H, rows, keys]: which keys, of the operands' order, lie in the block of a query."""
    own, device = operands.own, operands.own.q.device
    tokens = torch.arange(own.q.shape[2], device=device)
    key_tokens = tokens[keys] if own.permutation is None else own.permutation[:, :, None, keys]
    return key_tokens // BLOCK == (tokens[rows] // BLOCK)[:, None]


def _as_seen(operands: Operands4, rows: slice) -> Tensor:
    """Rotated queries as the 4-bit scores see them: rounded, plus their block means."""
    packed = operands.q
    rounded = NVFP4(packed.codes[:, :, rows], packed.group_scales[:, :, rows], packed.scale).dequantize()
    means = operands.q_means[:, :, (rows.start or 0) // BLOCK :]
    return rounded + expand_blocks(means, rounded.shape[2])


def _blocks(x: Tensor) -> Tensor:
    """[B, H, N, 128, D] of x [B, H, rows, D], the last block filled up with zeros."""
    return pad(x, (0, 0, 0, -x.shape[2] % BLOCK)).unflatten(2, (-1, BLOCK))
