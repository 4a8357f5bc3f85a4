"""A small case that the 8-bit Triton kernels must compute right on a card before their first real call."""

from __future__ import annotations

import torch

from ..arch import EIGHT_BIT, family
from ..quantize.operands import Operands8
from ..quantize.reference import quantize8
from ..quantize.triton8 import prepare8, to_reference
from ..testing import clustered_qkv, relative_l2
from .reference import attend8
from .settings import AUTO, Settings, resolve
from .triton8 import attend_triton8

SCALE = 0.1
# Against the reference on the same operands. Rounding the output is 1.7e-3 in bf16; the sums of the tensor cores add
# 4e-4 (INT8 queries and keys, measured on an H200). A fault of 1 % is far outside.
OUTPUT_LIMIT = {"int8": 5e-3, "e4m3": 1e-2}
CODE_LIMIT = 1e-3  # share of codes that may be one off: rounding ties
SCALE_LIMIT = 1e-5  # of scales in float32
MEANS_LIMIT = 5e-3  # of the largest mean: one may round to the neighbouring 16-bit number


def self_test(device, dtype) -> str | None:
    """Run preparation and attention on ``device`` for inputs of ``dtype``: None, or what is wrong and by how much."""
    settings = resolve(EIGHT_BIT, AUTO, AUTO, True, family(device))
    for head_dim in (128, 64):
        fault = _fault(device, dtype, head_dim, settings)
        if fault is not None:
            return f"head_dim {head_dim}: {fault}"
    return None


def _fault(device, dtype, head_dim: int, settings: Settings) -> str | None:
    q, k, v = clustered_qkv((3, 10, 23), heads=2, head_dim=head_dim, dtype=dtype, device=device)  # 6 tiles, one short
    q = q[:, :, :200]
    order = torch.arange(k.shape[2], device=device).flip(0).expand(1, 2, -1).to(torch.int32).contiguous()
    operands = prepare8(q, k, v, scale=SCALE, permutation=order, qk_format=settings.qk_format)
    prepared = to_reference(operands, q.shape[2], SCALE)
    fault = operand_fault(prepared, quantize8(q, k, v, order, settings.qk_format, True))
    if fault is not None:
        return fault
    output = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
    attend_triton8(operands, output, settings.probabilities)
    if not bool(output.isfinite().all()):
        return "attention: not every element was written"
    error = relative_l2(output, attend8(prepared, SCALE, settings.probabilities))
    limit = OUTPUT_LIMIT[settings.qk_format]
    return None if error <= limit else f"attention: relative error {error:.1e}, allowed {limit:.0e}"


def operand_fault(actual: Operands8, expected: Operands8) -> str | None:
    """What differs, beyond rounding, between a preparation and the reference; None if nothing does."""
    for name, got, wanted in (
        ("q", actual.q.codes, expected.q.codes),
        ("k", actual.k.codes, expected.k.codes),
        ("residual", actual.residual, expected.residual),
    ):
        wrong = (got != wanted).float().mean().item()
        if wrong > CODE_LIMIT:
            return f"preparation: {name} differs in {wrong:.2%} of its elements, allowed {CODE_LIMIT:.2%}"
    for name, got, wanted, limit in (
        ("q_scale", actual.q.scale, expected.q.scale, SCALE_LIMIT),
        ("k_scale", actual.k.scale, expected.k.scale, SCALE_LIMIT),
        ("residual_scale", actual.residual_scale, expected.residual_scale, SCALE_LIMIT),
        ("means", actual.means, expected.means.float(), MEANS_LIMIT),
    ):
        error = ((got - wanted).abs().amax() / wanted.abs().amax()).item()
        if not error <= limit:
            return f"preparation: {name} is off by {error:.1e}, allowed {limit:.0e}"
    return None
