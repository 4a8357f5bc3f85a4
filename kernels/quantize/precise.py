"""Operands of the precise Hopper kernel, and how they are made, in plain torch.

This is the specification of csrc/prepare_sm90.cu with -DPRECISE=1. Queries and means are those of quantize/hopper.py;
keys get one scale per 128-token block, residuals of the values INT8 with one scale per block and channel.

Sizes: D = 128, block = 128 tokens, S_pad = S rounded up to whole blocks, NB blocks of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import INT8_MAX
from ..group.blocks import BLOCK
from .hopper import (
    HEAD_DIM,
    HopperOperands,
    constant,
    head_by_head,
    in_key_order,
    in_mean_order,
    in_token_order,
    pad_rows,
    per_token,
    quantize_queries,
    rotate_unnormalized,
    round_to_int8,
    value_units,
)

# Smallest scale of a key block, relative to the head's: 0.45 * 0.16 codes per 256 units keep 9.2 octaves within the
# 1023 units the kernel can count.
K_SCALE_MIN = 0.45
SMALLEST_RESIDUAL = 1e-30  # in units of v_scale; a channel of a block below it is its mean


@dataclass(frozen=True, kw_only=True)
class PreciseOperands(HopperOperands):
    """Quantized operands of one call of the precise kernel; what differs from HopperOperands.

    Attributes:
        k8: int8 [BH, S_kv_pad, D]: one scale per block.
        v8: int8 [BH, D, S_kv_pad]: (v - block mean) / (v_scale * v_block_scale), keys in KEY_ORDER; 0 in the padding.
        k_block_scale: float32 [BH, NB]: scale of each key block relative to the head's, 0.45..1.
        v_block_scale: float32 [BH, NB, D]: scale of each block and channel relative to v_scale.
    """

    k_block_scale: Tensor
    v_block_scale: Tensor


def precise_operands(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, permutation: Tensor | None = None, demean: bool = True
) -> PreciseOperands:
    """Operands from q [B, H, S_q, D] and k, v [B, H, S_kv, D], bf16 or fp16; ``scale`` is the softmax scale."""

    def one_head(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        k8, k_scale, k_block_scale = quantize_key_blocks(k)
        q8, q_scale = quantize_queries(q, k_scale, scale)
        v8, v_scale, v_block_scale, means = quantize_value_blocks(v, demean)
        return {
            **{"q8": q8, "q_scale": q_scale, "k8": k8, "k_block_scale": k_block_scale},
            **{"v8": v8, "v_scale": v_scale, "v_block_scale": v_block_scale, "means": means},
        }

    return PreciseOperands(**head_by_head(one_head, q, k, v, permutation), kv_length=k.shape[2])


def quantize_key_blocks(k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k8 [S_kv_pad, D], the head's scale and the relative scale [NB] of each block, from permuted k [S_kv, D]."""
    x = rotate_unnormalized(k)
    centred = x - x.double().mean(0).float()
    inverse_root = constant(HEAD_DIM**-0.5, x)
    largest = pad_rows(centred.abs()).view(-1, BLOCK * HEAD_DIM).amax(1)
    k_scale = (largest.amax() * inverse_root / constant(INT8_MAX, x)).clamp_min(1e-10)
    block_scale = torch.maximum(largest * inverse_root / constant(INT8_MAX, x), K_SCALE_MIN * k_scale)
    k8 = round_to_int8(centred * per_token((inverse_root / block_scale)[:, None], len(k)))
    return pad_rows(k8), k_scale, block_scale / k_scale


def quantize_value_blocks(v: Tensor, demean: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """v8 [D, S_kv_pad], v_scale [D], v_block_scale [NB, D] and means [D, slots], from permuted v [S_kv, D]."""
    v_scale, stored, residual = value_units(v, demean)
    largest = pad_rows(residual.abs()).view(-1, BLOCK, HEAD_DIM).amax(1)
    used = largest > SMALLEST_RESIDUAL
    largest = torch.where(used, largest, torch.ones_like(largest))
    factor = torch.where(used, constant(INT8_MAX, v) / largest, torch.zeros_like(largest))
    # The product is exact in float64, and so rounded once, as the kernel's multiply-add does.
    codes = round_to_int8(residual.double() * per_token(factor.double(), len(v)))
    block_scale = torch.where(used, largest / constant(INT8_MAX, v), torch.zeros_like(largest))
    return in_key_order(pad_rows(codes)), v_scale, block_scale, in_mean_order(stored)


def decoded_value_blocks(operands: PreciseOperands) -> Tensor:
    """float32 [BH, S_kv_pad, D]: residuals in units of v_scale, keys in order."""
    scales = operands.v_block_scale.repeat_interleave(BLOCK, 1)
    return in_token_order(operands.v8.float()) * scales
