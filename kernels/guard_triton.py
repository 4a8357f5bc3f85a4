"""Every Triton kernel proves itself on the user's card before its first real call, as in guard.py.

Per device and dtype, on first question: is Triton there, do the kernels compile, do they equal the reference on the
same operands, and do they write all of a poisoned output.
"""

from __future__ import annotations

import logging
from importlib import import_module

from . import triton_support
from .verdicts import look_up, verdict_of

log = logging.getLogger("vc_attention")

SELF_TESTS = {
    "triton8": ".attend.self_test8",
    "triton4": ".attend.self_test4",
    "grouping": ".group.self_test",
}
# Where it is not triton_support.OLDEST: before, Triton cannot lower the scaled 4-bit product for sm_120.
OLDEST = {"triton4": (3, 6)}

_verdicts: dict[tuple, str | None] = {}


def why_triton8_is_unavailable(device, dtype: str) -> str | None:
    """Why the 8-bit Triton kernels cannot be used on ``device`` for inputs of ``dtype``; None if they can."""
    return why_unavailable("triton8", device, dtype)


def why_triton4_is_unavailable(device, dtype: str) -> str | None:
    """Why the 4-bit Triton kernels cannot be used on ``device`` for inputs of ``dtype``; None if they can."""
    return why_unavailable("triton4", device, dtype)


def why_grouping_is_unavailable(device, dtype: str) -> str | None:
    """Why Triton cannot group values of ``dtype`` on ``device``; None if it can."""
    return why_unavailable("grouping", device, dtype)


def why_unavailable(name: str, device, dtype: str) -> str | None:
    """The verdict of an implementation's self-test, made once per device and dtype."""
    import torch

    reason = triton_support.why_missing(OLDEST.get(name, triton_support.OLDEST))
    if reason is not None:
        return reason
    if device.type != "cuda":
        return f"runs on NVIDIA GPUs, not on {device.type}"
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (name, index, dtype)
    return look_up(_verdicts, key, lambda: _verdict(name, torch.device("cuda", index), getattr(torch, dtype)))


def _verdict(name: str, device, dtype) -> str | None:
    import torch

    card = torch.cuda.get_device_name(device)
    log.info("VC Attention: compiling and testing its Triton kernels for %s on %s", dtype, card)
    return verdict_of(lambda: _self_test(name, device, dtype), "does not compile or run here", card)


def _self_test(name: str, device, dtype) -> str | None:
    import torch

    # The caller's autocast and default device are not ours: the specifications need float32 on this device.
    with (
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.device("cpu"),
        torch.cuda.device(device),
    ):
        return import_module(SELF_TESTS[name], __package__).self_test(device, dtype)
