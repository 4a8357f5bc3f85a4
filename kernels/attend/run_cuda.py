"""The attention call on H100 and H200: preparation, attention, and a check of the inputs that costs no waiting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..arch import PRECISE
from ..errors import KernelUnavailable, UnsupportedCall
from ..quantize.cuda import prepare, prepare_precise
from ..quantize.hopper import HopperOperands
from ..quantize.precise import PreciseOperands
from .cuda import attend_cuda
from .finite import REFUSED, FiniteCheck
from .precise_cuda import attend_precise_cuda
from .settings import Settings

PRECISE_REFUSED = f"{REFUSED}, or v bf16 numbers of 2^81 or more"


def run(
    q: Tensor, k: Tensor, v: Tensor, permutation: Tensor | None, scale: float, settings: Settings, out: Tensor
) -> None:
    """Write attention of q [B, H, S_q, 128] and k, v [B, H, S_kv, 128] to ``out`` [B, H, S_q, 128].

    Raises:
        UnsupportedCall: q, k or v holds NaN or infinity (precise: or v bf16 numbers of 2^81 or more), or a kernel would
            have to be loaded during a graph capture.
    """
    if scale < 0:  # codes rise with the score
        q, scale = -q, -scale
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    try:
        if settings.mode == PRECISE:
            operands, kernel = prepare_precise(q, k, v, scale=scale), attend_precise_cuda
            refused = PRECISE_REFUSED
        else:
            if permutation is not None:
                permutation = permutation.to(torch.int32).contiguous()
            operands = prepare(q, k, v, scale=scale, permutation=permutation, demean=settings.demean)
            kernel = partial(attend_cuda, means=settings.demean, probabilities=settings.probabilities)
            refused = REFUSED
        finite = FiniteCheck(operands.flags, "cuda", refused)
        _attend(kernel, operands, out)
    except KernelUnavailable as error:
        raise UnsupportedCall({"cuda": error.reason}) from error
    finite.require()


def _attend(kernel: Callable, operands: HopperOperands | PreciseOperands, out: Tensor) -> None:
    if _writable_in_pairs(out):
        kernel(operands, out)
    else:
        aligned = torch.empty_like(out, memory_format=torch.contiguous_format)
        kernel(operands, aligned)
        out.copy_(aligned)


def _writable_in_pairs(out: Tensor) -> bool:
    """The kernel stores two neighbouring elements as one 32-bit word."""
    even = all(stride % 2 == 0 for stride, size in zip(out.stride()[:3], out.shape, strict=False) if size > 1)
    return even and out.stride(-1) == 1 and out.data_ptr() % 4 == 0
