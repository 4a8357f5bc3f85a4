"""A small case that the 4-bit Triton kernels must compute right on a card before their first real call."""

from __future__ import annotations

import torch

from ..quantize.reference import quantize4
from ..quantize.triton4 import TritonOperands4, lay_out, prepare4
from ..testing import clustered_qkv, relative_l2
from .reference import attend4
from .triton4 import attend_triton4

CASES = ((128, True), (64, False))  # each is about nine kernels to compile
SCALE = 0.1
# Against the reference on the same operands. Rounding the output is 1.7e-3 in bf16; probabilities that fall on the
# other side of a rounding tie add at most 1e-3. A fault of 1 % is far outside.
OUTPUT_LIMIT = 5e-3
# Share of bytes that may differ: a rounding tie moves what its error is fed into, up to the rest of its row. At most
# 1.3e-3 on an H200.
CODE_LIMIT = 1e-2
SCALE_LIMIT = 1e-5


def self_test(device, dtype) -> str | None:
    """Run preparation and attention on ``device`` for inputs of ``dtype``: None, or what is wrong and by how much."""
    for head_dim, demean in CASES:
        fault = _fault(device, dtype, head_dim, demean)
        if fault is not None:
            return f"head_dim {head_dim}{'' if demean else ', plain values'}: {fault}"
    return None


def _fault(device, dtype, head_dim: int, demean: bool) -> str | None:
    q, k, v = clustered_qkv((3, 13, 17), heads=2, head_dim=head_dim, dtype=dtype, device=device)  # 6 tiles, one short
    q = q[:, :, :200]
    order = torch.arange(k.shape[2], device=device).flip(0).expand(1, 2, -1).to(torch.int32)
    specified = quantize4(q, k, v, order, demean)
    expected = lay_out(specified, SCALE)
    fault = operand_fault(prepare4(q, k, v, scale=SCALE, permutation=order, demean=demean), expected)
    if fault is not None:
        return fault
    output = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
    attend_triton4(expected, output)
    if not bool(output.isfinite().all()):
        return "attention: not every element was written"
    error = relative_l2(output, attend4(specified, SCALE))
    return None if error <= OUTPUT_LIMIT else f"attention: relative error {error:.1e}, allowed {OUTPUT_LIMIT:.0e}"


def operand_fault(actual: TritonOperands4, expected: TritonOperands4, code_limit: float = CODE_LIMIT) -> str | None:
    """What differs, beyond rounding ties, between a preparation and the reference; None if nothing does."""
    for name in ("q", "q_scales", "k", "k_scales", "v", "v_scales"):
        wrong = (getattr(actual, name) != getattr(expected, name)).float().mean().item()
        if wrong > code_limit:
            return f"preparation: {name} differs in {wrong:.2%} of its bytes, allowed {code_limit:.2%}"
    for name in ("v_scale", "score_scale"):
        got, wanted = getattr(actual, name), getattr(expected, name)
        wrong = ((got - wanted).abs() / wanted).max().item()
        if not wrong <= SCALE_LIMIT:
            return f"preparation: {name} is off by {wrong:.1e}, allowed {SCALE_LIMIT:.0e}"
    return None
