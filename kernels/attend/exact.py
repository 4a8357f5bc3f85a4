"""Exact attention in float64: the oracle that quantization errors are measured against."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_PER_PASS = 512


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """``softmax(scale q k^T) v`` for q [B, H, S_q, D], k, v [B, H, S_kv, D]; float64, same shape as q.

    Args:
        scale: softmax scale, ``D ** -0.5`` by default.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys = k.double().transpose(2, 3)
    values = v.double()
    chunks = [torch.softmax(rows.double() @ keys * scale, -1) @ values for rows in q.split(ROWS_PER_PASS, dim=2)]
    return torch.cat(chunks, dim=2)
