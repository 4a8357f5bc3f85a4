"""The error of one attention call, measured on a few of its rows: what a guard asks before it trusts a layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..errors import InvalidArgument
from .validation import check_attention, check_output

ROWS = 64


def sampled_error(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    *,
    scale: float | None = None,
    layout: str = "BHSD",
    rows: int = ROWS,
) -> Tensor:
    """Relative L2 error of ``output`` on evenly spaced query rows, against torch's own attention on the same inputs.

    Costs one pass over k and v, without a matrix of S_q x S_kv, and does not wait for the GPU.

    Args:
        q, k, v: as for ``attention``.
        output: what is to be judged, of q's shape, dtype and device.
        scale: softmax scale, ``D ** -0.5`` by default.
        layout: "BHSD" or "BSHD", of all four tensors.
        rows: how many query rows per batch and head are compared; all of them where there are fewer.

    Returns:
        float32 scalar on q's device; infinity where a compared row of the output is not finite.

    Raises:
        InvalidArgument: an argument is wrong in itself.
    """
    check_attention(q, k, v, layout, scale, None)
    check_output(output, q, layout)
    if not isinstance(rows, int) or rows < 1:
        raise InvalidArgument(f"rows must be a whole number from 1, got {rows!r}")
    if layout == "BSHD":
        q, k, v, output = (x.transpose(1, 2) for x in (q, k, v, output))
    sample = _evenly_spaced(q.shape[2], rows, q.device)
    wanted = scaled_dot_product_attention(q.index_select(2, sample), k, v, scale=scale).float()
    error = (output.index_select(2, sample).float() - wanted).norm() / wanted.norm().clamp_min(1e-30)
    return error.nan_to_num(nan=float("inf"), posinf=float("inf"))


def _evenly_spaced(tokens: int, rows: int, device) -> Tensor:
    """Indices of ``rows`` tokens, one in the middle of each equal stretch."""
    rows = min(rows, tokens)
    places = torch.arange(rows, device=device, dtype=torch.int64)
    return (2 * places + 1) * tokens // (2 * rows)
