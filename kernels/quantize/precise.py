"""Operands of the precise Hopper kernel, and how they are made, in plain torch.

This is the specification of csrc/prepare_sm90.cu with -DPRECISE=1. Queries are those of quantize/hopper.py but for
the smallest scale; keys get one scale per 128 tokens. Values are not prepared: the kernel reads the caller's tensor.

Sizes: D = 128, block = 128 tokens, S_pad = S rounded up to whole blocks, NB blocks of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import INT8_MAX
from ..group.blocks import BLOCK
from .hopper import HEAD_DIM, constant, pad_rows, per_token, quantize_queries, rotate_unnormalized, round_to_int8

Q_SCALE_MIN = 2.0**-10
K_SCALE_MIN = 2.0**-10  # of the head's scale; a block of zeros needs one, too
# Magnitudes of v from here on are declined: 2^31 keys of probability 2^15, the kernel's largest, would leave float32.
VALUE_LIMIT = {torch.bfloat16: 2.0**81, torch.float16: float("inf")}


@dataclass(frozen=True)
class PreciseOperands:
    """Operands of one call; BH = B * H, head index b * H + h.

    Attributes:
        q8: int8 [BH, S_q_pad, D]: rotated q, one scale per row.
        q_scale: float32 [BH, S_q_pad]: 1/8 octaves per 256 units of q8.k8 where k has its head's scale; a half number
            in 2^-10..128.
        k8: int8 [BH, S_kv_pad, D]: rotated k without its mean over tokens, one scale per block.
        k_block_scale: float32 [BH, NB]: scale of each key block relative to the head's, 2^-10..1.
        v: [B, H, S_kv, D], bf16 or fp16.
        flags: int32 [1]: 1 where some q, k or v is not finite, or v reaches VALUE_LIMIT.
    """

    q8: Tensor
    q_scale: Tensor
    k8: Tensor
    k_block_scale: Tensor
    v: Tensor
    flags: Tensor | None = None


def precise_operands(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> PreciseOperands:
    """Operands from q [B, H, S_q, D] and k, v [B, H, S_kv, D], bf16 or fp16; ``scale`` is the softmax scale."""
    heads = [_one_head(*head, scale) for head in zip(q.flatten(0, 1), k.flatten(0, 1), strict=True)]
    return PreciseOperands(*map(torch.stack, zip(*heads, strict=True)), v)


def _one_head(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    k8, k_scale, k_block_scale = quantize_key_blocks(k)
    return *quantize_queries(q, k_scale, scale, Q_SCALE_MIN), k8, k_block_scale


def quantize_key_blocks(k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k8 [S_kv_pad, D], the head's scale and the relative scale [NB] of each block, from k [S_kv, D]."""
    x = rotate_unnormalized(k)
    centred = x - x.double().mean(0).float()
    inverse_root = constant(HEAD_DIM**-0.5, x)
    largest = pad_rows(centred.abs()).view(-1, BLOCK * HEAD_DIM).amax(1)
    k_scale = (largest.amax() * inverse_root / constant(INT8_MAX, x)).clamp_min(1e-10)
    block_scale = torch.maximum(largest * inverse_root / constant(INT8_MAX, x), K_SCALE_MIN * k_scale)
    k8 = round_to_int8(centred * per_token((inverse_root / block_scale)[:, None], len(k)))
    return pad_rows(k8), k_scale, block_scale / k_scale
