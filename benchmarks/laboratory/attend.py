"""One attention call in any of the formats, emulated."""

from __future__ import annotations

from torch import Tensor
from vc_attention.quantize.operands import has_own_block
from vc_attention.quantize.rotation import rotate

from .attend_torch import attend_torch
from .formats import Formats
from .operands import Operands, prepare
from .own_block import own_order


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    formats: Formats,
    permutation: Tensor | None,
    demean: bool,
    grid: tuple[int, int, int],
) -> Tensor:
    """[B, H, S, D] float32 of q, k, v [B, H, S, D], self-attention of clips of ``grid`` (frames, rows, columns).

    Args:
        permutation: int32 [B, H, S], order of keys and values, or None.
        demean: whether block means of the values are removed.
    """
    has_own = formats.own != "none" and has_own_block(q.shape[2], k.shape[2])
    order = own_order(formats.own, grid, q.device) if has_own else None
    output = recurrence(prepare(q, k, v, formats, permutation, demean, order), formats)
    return rotate(output) if formats.rotate_values else output


def recurrence(operands: Operands, formats: Formats) -> Tensor:
    """The emulation that fits the device: [B, H, S, D] float32."""
    if not operands.q.is_cuda:
        return attend_torch(operands, formats)
    from .attend_triton import attend_triton

    return attend_triton(operands, formats)
