"""Trust, but only after a test: every GPU kernel proves itself on the user's card before its first real call.

A build can be broken in ways that no version number shows. So at first use, per device, dtype, mode and way to make
probabilities, a small random case runs through grouping (where the mode groups), preparation and attention into
poisoned memory, and is compared with plain torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from .arch import EIGHT_BIT, PRECISE, uses_grouping
from .attend.settings import PROBABILITIES
from .verdicts import look_up, verdict_of

log = logging.getLogger("vc_attention")

# The output is rounded to 16 bit, which alone is 1.7e-3 in bf16; the kernel's own arithmetic adds 3e-4 (measured on an
# H200 over every length from 1 to 130 and adversarial inputs: at most 1.9e-3). A fault of 1 % is far outside.
OUTPUT_LIMIT = 5e-3
CODE_LIMIT = 1e-3  # share of q8 and k8 that may be one code off: rounding ties, at most 6e-5 measured
SCALE_LIMIT = 2e-3  # q_scale is rounded up to a half: one step of it is 1e-3

HEADS, Q_TOKENS = 2, 200
GRID = (5, 25, 33)
TOKENS = math.prod(GRID)  # 33 tiles, the last one short

_verdicts: dict[tuple[int, str, str, str], str | None] = {}


def why_cuda_is_unavailable(device, dtype: str, mode: str = EIGHT_BIT, probabilities: str | None = None) -> str | None:
    """Why the Hopper kernels of ``mode`` cannot be used on ``device`` for inputs of ``dtype``; None if they can.

    The first question per device, dtype, mode and probabilities (None: those of ``auto``) compiles, unless the cache
    has the code, and tests; later ones look up.
    """
    import torch

    index = torch.cuda.current_device() if device.index is None else device.index
    probabilities = probabilities or PROBABILITIES[mode][0]
    key = (index, dtype, mode, probabilities)
    tested_on = torch.device("cuda", index)
    return look_up(_verdicts, key, lambda: _verdict(tested_on, getattr(torch, dtype), mode, probabilities))


def _verdict(device, dtype, mode: str, probabilities: str) -> str | None:
    import torch

    card = torch.cuda.get_device_name(device)
    return verdict_of(lambda: self_test(device, dtype, mode, probabilities), "self-test could not run", card)


def self_test(device, dtype, mode: str = EIGHT_BIT, probabilities: str | None = None) -> str | None:
    """Run the Hopper kernels of ``mode`` on a small case on ``device``: None, or what is wrong and by how much."""
    import torch

    from .group.check import CLUSTERS, ITERATIONS, grouping_fault
    from .group.cuda import group_cuda
    from .testing import clustered_qkv

    kernels = _kernels(mode, probabilities or PROBABILITIES[mode][0])
    log.info("VC Attention: testing its %s kernels for %s on %s", mode, dtype, torch.cuda.get_device_name(device))
    # The caller's autocast and default device are not ours: the specifications need float32 on this device.
    with (
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.device("cpu"),
        torch.cuda.device(device),
    ):
        q, k, v = clustered_qkv(GRID, heads=HEADS, dtype=dtype, device=device)
        q = q[:, :, :Q_TOKENS]
        arguments = {"scale": 0.04}  # low: a fifth of the rows take their first maximum lower (attend/hopper.py)
        if uses_grouping(mode):
            arguments["permutation"], _ = group_cuda(v, None, CLUSTERS, ITERATIONS)
            fault = grouping_fault(v, arguments["permutation"])
            if fault is not None:  # positions outside the sequence would fault in the preparation
                return f"grouping: {fault}"
        operands = kernels.prepare(q, k, v, **arguments)
        expected = kernels.prepare_reference(q, k, v, **arguments)
        return _operand_fault(operands, expected) or _output_fault(kernels, operands, q)


class _Kernels(NamedTuple):
    """The kernels of a mode and their specifications."""

    prepare: Callable
    prepare_reference: Callable
    attend: Callable
    attend_reference: Callable


def _kernels(mode: str, probabilities: str) -> _Kernels:
    from .attend import cuda, hopper, precise, precise_cuda
    from .attend.tile_schedule import split
    from .quantize import cuda as prepare_cuda
    from .quantize.hopper import hopper_operands
    from .quantize.precise import precise_operands

    if mode == PRECISE:
        attend = precise_cuda.attend_precise_cuda, precise.attend_precise
        return _Kernels(prepare_cuda.prepare_precise, precise_operands, *attend)
    # Keys of the second head in two parts, the border in the middle of a group of means.
    switches = {"probabilities": probabilities, "schedule": split(HEADS, Q_TOKENS, TOKENS, 1, 20)}
    attend = (partial(run, **switches) for run in (cuda.attend_cuda, hopper.attend_hopper))
    return _Kernels(prepare_cuda.prepare, hopper_operands, *attend)


def _operand_fault(operands, expected) -> str | None:
    from torch import Tensor

    for name, wanted in vars(expected).items():
        if not isinstance(wanted, Tensor) or name in ("flags", "v"):  # v is the caller's own
            continue
        actual = getattr(operands, name).float()
        if name.endswith("scale"):
            fault = _scale_fault(actual, wanted.float())
        else:
            fault = _code_fault(actual, wanted.float(), neighbours=name in ("q8", "k8"))
        if fault is not None:
            return f"preparation: {name} differs {fault}"
    return None


def _scale_fault(actual, wanted) -> str | None:
    largest = ((actual - wanted).abs() / wanted).max().item()  # NaN if there is one
    return None if largest <= SCALE_LIMIT else f"by {largest:.1e} of itself, allowed {SCALE_LIMIT:.0e}"


def _code_fault(actual, wanted, *, neighbours: bool) -> str | None:
    difference = (actual - wanted).abs()
    wrong = (difference != 0).float().mean().item()
    if wrong > CODE_LIMIT:
        return f"in {wrong:.2%} of its elements, allowed {CODE_LIMIT:.2%}"
    largest = difference.max().item()
    return f"by {largest:.0f} codes, allowed 1" if neighbours and largest > 1 else None


def _output_fault(kernels: _Kernels, operands, q) -> str | None:
    import torch

    from .testing import relative_l2

    output = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
    kernels.attend(operands, output)
    if not bool(output.isfinite().all()):
        return "attention: not every element was written"
    error = relative_l2(output, kernels.attend_reference(operands, q.shape[2]).view_as(output))
    return None if error <= OUTPUT_LIMIT else f"attention: relative error {error:.1e}, allowed {OUTPUT_LIMIT:.0e}"
