"""The attention call in 4 bits through Triton: preparation, attention, and a check of the inputs without waiting."""

from __future__ import annotations

from torch import Tensor

from ..quantize.triton4 import prepare4
from ..triton_support import aligned
from .finite import REFUSED, FiniteCheck
from .settings import Settings
from .triton4 import attend_triton4

NAME = "triton4"
TOO_LARGE = f"{REFUSED}, or numbers of q and k whose products could pass 1e37"


def run(
    q: Tensor, k: Tensor, v: Tensor, permutation: Tensor | None, scale: float, settings: Settings, out: Tensor
) -> None:
    """Write attention of q [B, H, S_q, D] and k, v [B, H, S_kv, D] to ``out`` [B, H, S_q, D]; D is 64 or 128.

    Raises:
        UnsupportedCall: q, k or v holds NaN or infinity, or products of q and k could pass 1e37.
    """
    operands = prepare4(
        q, k, v, scale=scale, permutation=permutation, demean=settings.demean, own_block=settings.own_block
    )
    finite = FiniteCheck(operands.flags, NAME, TOO_LARGE)
    written = aligned(out)
    attend_triton4(operands, written)
    if written is not out:
        out.copy_(written)
    finite.require()
