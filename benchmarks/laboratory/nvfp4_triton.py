"""Rounding to NVFP4 on a GPU in one pass, on float32 registers: what `operands` does in plain torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from vc_attention.quantize.nvfp4 import SCALE_STEPS
from vc_attention.triton_kernels.nvfp4 import closest_scales, decode_ue4m3, inverse_of, round_e2m1, round_ue4m3

GROUPS_PER_PROGRAM = 256


@triton.jit
def nvfp4_groups(x, largest):
    """``x`` [.., 16] >= 0 in NVFP4 before the FP32 scale; ``largest`` [.., 1] of each group, at most 448 * 6."""
    scale = round_ue4m3(largest / 6.0)
    return round_e2m1(x / tl.where(scale > 0.0, scale, 1.0), True) * scale


@triton.jit
def closest_groups(x, CANDIDATES: tl.constexpr):
    """The same of ``x`` [N, 16] by the best of the scales of quantize/nvfp4.py, as the 4-bit preparation rounds."""
    scale = decode_ue4m3(closest_scales(x, CANDIDATES, True))
    return round_e2m1(x * inverse_of(scale, True)[:, None], True) * scale[:, None]


@triton.jit
def nvfp4_fwd_kernel(x, out, groups, CANDIDATES: tl.constexpr, GROUPS: tl.constexpr):
    """x float32, out fp16, both [groups, 16]; a program rounds GROUPS of them. CANDIDATES 0: a group's largest to 6."""
    o_group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    m_group = (o_group < groups)[:, None]
    o_x = o_group[:, None] * 16 + tl.arange(0, 16)[None, :]
    b_x = tl.load(x + o_x, mask=m_group, other=0.0)
    b_size = tl.abs(b_x)
    b_number = closest_groups(b_size, CANDIDATES) if CANDIDATES else nvfp4_groups(b_size, tl.max(b_size, 1)[:, None])
    tl.store(out + o_x, tl.where(b_x < 0.0, -b_number, b_number).to(tl.float16), mask=m_group)


def nvfp4_numbers_triton(x: Tensor, closest: bool = False) -> Tensor:
    """fp16 of ``x``'s shape, whose last dimension is a multiple of 16; ``closest``: the best of five scales each."""
    x = x.float().contiguous()
    out = torch.empty_like(x, dtype=torch.float16)
    groups = x.numel() // 16
    grid = (triton.cdiv(groups, GROUPS_PER_PROGRAM),)
    candidates = len(SCALE_STEPS) if closest else 0
    nvfp4_fwd_kernel[grid](x, out, groups, CANDIDATES=candidates, GROUPS=GROUPS_PER_PROGRAM)
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
