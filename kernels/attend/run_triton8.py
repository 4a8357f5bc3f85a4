"""The attention call in 8 bits through Triton: preparation, attention, and a check of the inputs without waiting."""

from __future__ import annotations

import torch
from torch import Tensor

from ..quantize.triton8 import prepare8
from ..triton_support import aligned
from .finite import FiniteCheck
from .settings import Settings
from .triton8 import attend_triton8

NAME = "triton8"


def run(
    q: Tensor, k: Tensor, v: Tensor, permutation: Tensor | None, scale: float, settings: Settings, out: Tensor
) -> None:
    """Write attention of q [B, H, S_q, D] and k, v [B, H, S_kv, D] to ``out`` [B, H, S_q, D]; D is 64 or 128.

    Raises:
        UnsupportedCall: q, k or v holds NaN or infinity.
    """
    if permutation is not None:
        permutation = permutation.to(torch.int32).contiguous()
    operands = prepare8(
        *(aligned(x) for x in (q, k, v)),
        scale=scale,
        permutation=permutation,
        qk_format=settings.qk_format,
        demean=settings.demean,
    )
    finite = FiniteCheck(operands.flags, NAME)
    written = aligned(out)
    attend_triton8(operands, written, settings.probabilities)
    if written is not out:
        out.copy_(written)
    finite.require()
