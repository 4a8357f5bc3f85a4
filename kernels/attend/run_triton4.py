"""The attention call in 4 bits through Triton: preparation, attention, and a check of the inputs without waiting."""

from __future__ import annotations

from torch import Tensor

from ..errors import UnsupportedCall
from ..quantize.triton4 import HEAD_DIMS, prepare4
from ..triton_support import aligned
from .finite import FiniteCheck
from .settings import Settings
from .triton4 import attend_triton4

NAME = "triton4"


def run(
    q: Tensor, k: Tensor, v: Tensor, permutation: Tensor | None, scale: float, settings: Settings, out: Tensor
) -> None:
    """Write attention of q [B, H, S_q, D] and k, v [B, H, S_kv, D] to ``out`` [B, H, S_q, D]; D is 64 or 128.

    Raises:
        UnsupportedCall: the call is beyond the kernels' sizes, or q, k or v holds NaN or infinity.
    """
    reason = refusal(q, k)
    if reason is not None:
        raise UnsupportedCall({NAME: reason})
    operands = prepare4(q, k, v, scale=scale, permutation=permutation, demean=settings.demean)
    finite = FiniteCheck(operands.flags, NAME)
    written = aligned(out)
    attend_triton4(operands, written)
    if written is not out:
        out.copy_(written)
    finite.require()


def refusal(q: Tensor, k: Tensor) -> str | None:
    """Why these kernels do not serve a call of a supported mode and dtype; None if they do."""
    head_dim = q.shape[3]
    if head_dim not in HEAD_DIMS:
        return f"serves head_dim {' and '.join(map(str, HEAD_DIMS))}, not {head_dim}"
    if q.shape[0] * q.shape[1] * max(q.shape[2], k.shape[2]) >= 2**31:
        return "serves B * H * S below 2^31"
    return None
