"""The own block: a query's scores with the keys of its own 128 tokens, and their values, stay in 16 bit.

Those keys leave the low-bit recurrence, which starts with them as seen: their log-sum-exp is its first maximum. So the
4-bit mode does it (docs/blackwell.md); here every format can, and the 128 tokens can also be a cube of the clip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from vc_attention.group.blocks import BLOCK

from .orders import cube_order


@dataclass(frozen=True)
class OwnBlock:
    """What was attended to in 16 bit.

    Attributes:
        of_queries: int32 [S], the own block of each query.
        of_keys: int32 [B, H, S], of each key, in permuted order.
        total: float32 [B, H, S], log-sum-exp of a query's scores in it, in octaves.
        output: float32 [B, H, S, D], attention to it alone.
    """

    of_queries: Tensor
    of_keys: Tensor
    total: Tensor
    output: Tensor


def own_order(own: str, grid: tuple[int, int, int], device: torch.device) -> Tensor:
    """int64 [S]: tokens of a clip of ``grid`` in an order in which each 128 are one another's own block."""
    if own == "cube":
        return cube_order(grid, device).long()
    return torch.arange(math.prod(grid), device=device)


def block_of_token(order: Tensor) -> Tensor:
    """int32 [S]: the own block of every token of the sequence."""
    blocks = torch.arange(len(order), dtype=torch.int32, device=order.device) // BLOCK
    return torch.empty_like(blocks).scatter_(0, order, blocks)


def attend_own(q: Tensor, k: Tensor, v: Tensor, shift: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Exact attention of every query to its own block.

    Args:
        q, k, v: [B, H, S, D]; k as the low-bit scores see it, without its mean or with it.
        shift: [B, H, S] float32, octaves added to every score of a query.
        order: of `own_order`.

    Returns:
        Log-sum-exp [B, H, S] in octaves and output [B, H, S, D], float32.
    """
    queries, keys, values, shifts = (_blocks(x, order) for x in (q, k, v, shift.unsqueeze(3)))
    scores = queries @ keys.transpose(3, 4) * (q.shape[3] ** -0.5 * math.log2(math.e)) + shifts
    places = torch.arange(scores.shape[2] * BLOCK, device=q.device).view(-1, 1, BLOCK)
    scores = scores.masked_fill(places >= len(order), -torch.inf) * math.log(2)
    total = scores.logsumexp(4, keepdim=True)
    output = torch.exp(scores - total) @ values
    total, output = (x.flatten(2, 3)[:, :, order.argsort()] for x in (total / math.log(2), output))
    return total.squeeze(3), output


def _blocks(x: Tensor, order: Tensor) -> Tensor:
    """float32 [B, H, ceil(S / 128), 128, X] of x [B, H, S, X] in ``order``; the last block filled up with zeros."""
    return pad(x[:, :, order].float(), (0, 0, 0, -x.shape[2] % BLOCK)).unflatten(2, (-1, BLOCK))
