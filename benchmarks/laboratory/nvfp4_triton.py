"""Rounding to E4M3, E2M1 and NVFP4 on a GPU in one pass, on float32 registers: what `operands` does in plain torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUPS_PER_PROGRAM = 256


@triton.jit
def round_half_even(x):
    """To the nearest integer for ``0 <= x < 2^22``: adding 1.5 * 2^23 leaves no bit for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def round_e2m1(x):
    """``0 <= x <= 6`` to E2M1."""
    step = tl.where(x < 2.0, 0.5, tl.where(x < 4.0, 1.0, 2.0))
    return round_half_even(x / step) * step


@triton.jit
def round_e4m3(x):
    """``0 <= x <= 448`` to E4M3: ties to even at 3 mantissa bits, multiples of 2^-9 below 2^-6."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20 << 20).to(tl.float32, bitcast=True)
    return tl.where(x < 0.015625, round_half_even(x * 512.0) * 0.001953125, normal)


@triton.jit
def encode_e4m3(x):
    """Code of an E4M3 number ``x >= 0``."""
    normal = (x.to(tl.int32, bitcast=True) >> 20) - 960  # exponent 127 - 7 = 120, and 3 mantissa bits
    return tl.where(x < 0.015625, (x * 512.0).to(tl.int32), normal)


@triton.jit
def decode_e4m3(code):
    """float32 of E4M3 codes 0 to 126."""
    normal = ((code + 960) << 20).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def nvfp4_groups(x, largest):
    """``x`` [.., 16] >= 0 in NVFP4 before the FP32 scale; ``largest`` [.., 1] of each group, at most 448 * 6."""
    scale = round_e4m3(largest / 6.0)
    return round_e2m1(tl.minimum(x / tl.where(scale > 0.0, scale, 1.0), 6.0)) * scale


@triton.jit
def nearer(x, code, best, least):
    """``best`` or, where its squared error is below ``least``, ``x`` [.., 16] >= 0 under the scale of ``code``."""
    scale = decode_e4m3(tl.minimum(tl.maximum(code, 0), 126))
    inverse = tl.where(scale > 0.0, 1.0 / scale, 0.0)
    number = round_e2m1(tl.minimum(x * inverse, 6.0)) * scale
    error = tl.sum((number - x) * (number - x), 1)[:, None]
    return tl.where(error < least, number, best), tl.minimum(error, least)


@triton.jit
def closest_groups(x, largest):
    """The same by the best of the scales of quantize/nvfp4.py."""
    at_6 = encode_e4m3(round_e4m3(tl.minimum(largest * 0.16666666666666666, 448.0)))
    best, least = nearer(x, at_6, x, float("inf"))
    best, least = nearer(x, at_6 - 1, best, least)
    best, least = nearer(x, at_6 + 1, best, least)
    best, least = nearer(x, at_6 + 4, best, least)
    best, least = nearer(x, at_6 + 5, best, least)
    return best


@triton.jit
def nvfp4_fwd_kernel(x, out, groups, CLOSEST: tl.constexpr, GROUPS: tl.constexpr):
    """x float32, out fp16, both [groups, 16]; a program rounds GROUPS of them."""
    o_group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    m_group = (o_group < groups)[:, None]
    o_x = o_group[:, None] * 16 + tl.arange(0, 16)[None, :]
    b_x = tl.load(x + o_x, mask=m_group, other=0.0)
    b_size = tl.abs(b_x)
    b_largest = tl.max(b_size, 1)[:, None]
    b_number = closest_groups(b_size, b_largest) if CLOSEST else nvfp4_groups(b_size, b_largest)
    tl.store(out + o_x, tl.where(b_x < 0.0, -b_number, b_number).to(tl.float16), mask=m_group)


def nvfp4_numbers_triton(x: Tensor, closest: bool = False) -> Tensor:
    """fp16 of ``x``'s shape, whose last dimension is a multiple of 16; ``closest``: the best of five scales each."""
    x = x.float().contiguous()
    out = torch.empty_like(x, dtype=torch.float16)
    groups = x.numel() // 16
    nvfp4_fwd_kernel[(triton.cdiv(groups, GROUPS_PER_PROGRAM),)](
        x, out, groups, CLOSEST=closest, GROUPS=GROUPS_PER_PROGRAM
    )
    return out


def fed_back_numbers_triton(x: Tensor, weights: Tensor) -> Tensor:
    """float32 of ``x`` [B, H, S, D]: `fed_back_nvfp4` of quantize/nvfp4.py, before the FP32 scale.

    Args:
        weights: of `feedback`.
    """
    rest, made, weights = x.clone(), [], weights.float()
    for start in range(0, x.shape[3], 16):
        group = slice(start, start + 16)
        numbers = nvfp4_numbers_triton(rest[..., group], closest=True).float()
        error = (numbers - rest[..., group]).half().float()
        made.append(numbers)
        rest[..., group.stop :] -= error @ weights[:, :, group, group.stop :]
    return torch.cat(made, dim=3)
