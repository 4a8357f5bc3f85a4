"""The number formats of SageAttention2 on Hopper, emulated: it cannot be installed from a package index.

Not its kernel and no time, only what its formats cost in error. Scores: INT8, one scale per 16 rows of q and per 128
rows of k ("per warp"), k without its mean over tokens. Probabilities: exponential against the running maximum times
448, cast to E4M3; their sum is taken before the cast. Values: E4M3, one scale per channel. All sums in float32.
Source: SageAttention2 (arXiv 2411.10958), sections 3.2 to 3.4, and the choices of its sm_90 kernel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Q_ROWS, K_ROWS = 16, 128
E4M3_MAX, INT8_MAX = 448.0, 127.0


def attend_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Attention of the query rows ``rows``: float32 [B, H, len(rows), D] of q, k, v [B, H, S, D]."""
    heads = [_attend_head(q[:, h], k[:, h], v[:, h], rows) for h in range(q.shape[1])]
    return torch.stack(heads, dim=1)


def _attend_head(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    q8, q_scale = _rows_of_q(q, rows)
    keys = k.float() - k.float().mean(1, keepdim=True)
    v_scale = v.float().abs().amax(1, keepdim=True) / E4M3_MAX
    values = _e4m3(v.float() / v_scale)
    maximum = torch.full((*q8.shape[:2], 1), -math.inf, device=q.device)
    total, output = torch.zeros_like(maximum), torch.zeros_like(q8)
    for start in range(0, k.shape[1], K_ROWS):
        k8, k_scale = _int8(keys[:, start : start + K_ROWS], (1, 2))
        scores = (q8 @ k8.transpose(1, 2)) * (q_scale * k_scale * (q.shape[-1] ** -0.5 * math.log2(math.e)))
        raised = torch.maximum(maximum, scores.amax(2, keepdim=True))
        keep, maximum = torch.exp2(maximum - raised), raised
        probabilities = torch.exp2(scores - maximum) * E4M3_MAX
        total = total * keep + probabilities.sum(2, keepdim=True)
        output = output * keep + _e4m3(probabilities) @ values[:, start : start + K_ROWS]
    return output / total * v_scale


def _rows_of_q(q: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in INT8, float32 [B, R, D], and the scale [B, R, 1] of the 16 rows that each is quantized with."""
    neighbours = (rows // Q_ROWS * Q_ROWS)[:, None] + torch.arange(Q_ROWS, device=rows.device)
    groups = q[:, neighbours.clamp_max(q.shape[1] - 1)].float()
    scale = groups.abs().amax((2, 3))[..., None] / INT8_MAX
    return (q[:, rows].float() / scale).round(), scale


def _int8(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(dims, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / INT8_MAX
    return (x / scale).round(), scale


def _e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float()
