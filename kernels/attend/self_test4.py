"""A small case that the 4-bit Triton kernels must compute right on a card before their first real call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..quantize.reference import quantize4
from ..quantize.triton4 import TritonOperands4, lay_out, prepare4
from ..testing import clustered_qkv, relative_l2
from .reference import attend4
from .triton4 import attend_triton4

# Head dim, means removed, own block in 16 bit. A head dim is about ten kernels to compile, the second case two.
CASES = ((128, True, True), (128, True, False), (64, False, True))
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
    for head_dim, demean, own_block in CASES:
        fault = _fault(device, dtype, head_dim, demean, own_block)
        if fault is not None:
            values, own = "" if demean else ", plain values", "" if own_block else ", no own block"
            return f"head_dim {head_dim}{values}{own}: {fault}"
    return None


def _fault(device, dtype, head_dim: int, demean: bool, own_block: bool) -> str | None:
    q, k, v = clustered_qkv((3, 13, 17), heads=2, head_dim=head_dim, dtype=dtype, device=device)  # 6 tiles, one short
    if not own_block:
        q = q[:, :, :200]
    order = torch.arange(k.shape[2], device=device).flip(0).expand(1, 2, -1).to(torch.int32)
    specified = quantize4(q, k, v, order, demean, own_block)
    expected = lay_out(specified, SCALE)
    prepared = prepare4(q, k, v, scale=SCALE, permutation=order, demean=demean, own_block=own_block)
    fault = operand_fault(prepared, expected)
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
    for name, wanted in _factors(expected).items():
        wrong = ((_factors(actual)[name] - wanted).abs() / wanted.abs().amax(-1, keepdim=True)).max().item()
        if not wrong <= SCALE_LIMIT:
            return f"preparation: {name} is off by {wrong:.1e}, allowed {SCALE_LIMIT:.0e}"
    return None


def _factors(operands: TritonOperands4) -> dict[str, Tensor]:
    """Numbers in float32 by name; scales stand alone in their last dimension."""
    factors = {"v_scale": operands.v_scale[..., None], "score_scale": operands.score_scale[..., None]}
    own = operands.own
    if own is not None:
        factors |= {"q_scale": own.q_scale[..., None], "octaves": own.octaves[..., None]}
        factors |= {"q_means": own.q_means, "key_mean": own.key_mean}
    return factors
