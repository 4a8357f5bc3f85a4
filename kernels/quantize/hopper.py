"""Operands of the Hopper attention kernel, and how they are made, in plain torch.

This is the specification of csrc/prepare_sm90.cu: the same roundings, one head at a time. The kernel's values, scales
and means are bit-equal to it; q8 and k8 differ by one code in at most 6e-5 of the elements, where another order of
additions meets a rounding tie.

Sizes: D = 128, block = 128 tokens, S_pad = S rounded up to whole blocks, NB blocks of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..formats import E4M3_MAX, INT8_MAX
from ..group.blocks import BLOCK
from .rotation import hadamard_matrix

HEAD_DIM = 128
# Codes per 256 units of q8.k8. Below 0.16 a score needs more bits than the kernel has; above 128 one unit of 256 would
# be 16 octaves. A row that wants more is shortened, not clipped: it keeps its direction.
Q_SCALE_MIN, Q_SCALE_MAX = 0.16, 128.0
MEAN_MAX = 60000.0  # means are stored as half

_QUAD = tuple(key for c in range(4) for key in (2 * c, 2 * c + 1, 8 + 2 * c, 9 + 2 * c))
# Key at each position of a group of 32: the score accumulators of a thread are then its A fragment of P V.
KEY_ORDER = _QUAD + tuple(16 + key for key in _QUAD)
# Block at each slot of a group of 16: the row sums of a thread are then its A fragment of the mean product.
MEAN_ORDER = tuple(4 * ((slot & 1) + 2 * (slot >> 3)) + ((slot >> 1) & 3) for slot in range(16))
MEANS_GROUP = len(MEAN_ORDER)


@dataclass(frozen=True)
class HopperOperands:
    """Quantized operands of one call; BH = B * H, head index b * H + h. Keys and values are in permuted order.

    Attributes:
        q8: int8 [BH, S_q_pad, D]: rotated q, one scale per row.
        q_scale: float32 [BH, S_q_pad]: codes (1/8 octave) per 256 units of q8.k8, a half number in 0.16..128.
        k8: int8 [BH, S_kv_pad, D]: rotated k without its mean over tokens, one scale per head.
        v8: uint8 [BH, D, S_kv_pad]: E4M3 bits of (v - block mean) / v_scale, keys in KEY_ORDER; never 0x7f or 0xff.
        v_scale: float32 [BH, D]: one per channel.
        means: float16 [BH, D, 16 ceil(NB / 16)]: block means / v_scale, blocks in MEAN_ORDER.
        kv_length: S_kv.
        flags: int32 [1]: 1 where some q, k or v is not finite.
    """

    q8: Tensor
    q_scale: Tensor
    k8: Tensor
    v8: Tensor
    v_scale: Tensor
    means: Tensor
    kv_length: int
    flags: Tensor | None = None


def hopper_operands(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, permutation: Tensor | None = None, demean: bool = True
) -> HopperOperands:
    """Operands from q [B, H, S_q, D] and k, v [B, H, S_kv, D], bf16 or fp16; ``scale``: of the softmax, 0 or more."""

    def one_head(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        k8, k_scale = quantize_keys(k)
        q8, q_scale = quantize_queries(q, k_scale, scale)
        v8, v_scale, means = quantize_values(v, demean)
        return {"q8": q8, "q_scale": q_scale, "k8": k8, "v8": v8, "v_scale": v_scale, "means": means}

    return HopperOperands(**head_by_head(one_head, q, k, v, permutation), kv_length=k.shape[2])


def head_by_head(
    one_head: Callable[..., dict[str, Tensor]], q: Tensor, k: Tensor, v: Tensor, permutation: Tensor | None
) -> dict[str, Tensor]:
    """What ``one_head`` makes of q [S_q, D] and permuted k, v [S_kv, D] of each head, stacked: [BH, ...] by name."""
    if permutation is not None:
        index = permutation.long().unsqueeze(-1).expand_as(k)
        k, v = k.gather(2, index), v.gather(2, index)
    rows = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    made = [one_head(*head) for head in zip(*rows, strict=True)]
    return {name: torch.stack([head[name] for head in made]) for name in made[0]}


def constant(x: float, like: Tensor) -> Tensor:
    """A tensor: torch on CUDA turns a division by a number into a product."""
    return torch.tensor([x], dtype=torch.float32, device=like.device)


def rotate_unnormalized(x: Tensor) -> Tensor:
    """x times the matrix of signs, float32. The kernel folds 1 / sqrt(D) into its scales."""
    signs = torch.sign(hadamard_matrix(HEAD_DIM, x.device))
    return (x.double() @ signs).float()


def quantize_keys(k: Tensor) -> tuple[Tensor, Tensor]:
    """k8 [S_kv_pad, D] and the head's scale, from k [S_kv, D]."""
    x = rotate_unnormalized(k)
    centred = x - x.double().mean(0).float()
    inverse_root = constant(HEAD_DIM**-0.5, x)
    k_scale = (centred.abs().amax() * inverse_root / constant(INT8_MAX, x)).clamp_min(1e-10)
    return pad_rows(round_to_int8(centred * (inverse_root / k_scale))), k_scale


def quantize_queries(q: Tensor, k_scale: Tensor, scale: float, least: float = Q_SCALE_MIN) -> tuple[Tensor, Tensor]:
    """q8 [S_q_pad, D] and q_scale [S_q_pad], not below ``least``, from q [S_q, D]."""
    x = rotate_unnormalized(q)
    codes = constant(8 * math.log2(math.e) * scale, x) * constant(HEAD_DIM**-0.5, x)
    largest = x.abs().amax(1)
    wanted = largest * codes / constant(INT8_MAX, x) * (256 * k_scale)
    q_scale = _half_not_below(wanted.clamp(least, Q_SCALE_MAX))
    factor = torch.where(wanted > Q_SCALE_MAX, constant(INT8_MAX, x) / largest, codes * (256 * k_scale) / q_scale)
    padding = _half_not_below(constant(least, x)).expand(-len(x) % BLOCK)
    return pad_rows(round_to_int8(x * factor[:, None])), torch.cat([q_scale, padding])


def quantize_values(v: Tensor, demean: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """v8 [D, S_kv_pad], v_scale [D] and means [D, slots], from permuted v [S_kv, D].

    The residual may exceed 448 by the rounding of the mean, at most 16 (half a unit of a half below 65536); it then
    saturates, with an error no larger than half of E4M3's spacing there.
    """
    v_scale, stored, residual = value_units(v, demean)
    codes = pad_rows(residual.clamp(-E4M3_MAX, E4M3_MAX)).to(torch.float8_e4m3fn).view(torch.uint8)
    return in_key_order(codes), v_scale, in_mean_order(stored)


def value_units(v: Tensor, demean: bool) -> tuple[Tensor, Tensor, Tensor]:
    """v_scale [D], block means [NB, D] as stored (half) and residual [S_kv, D] against those, both in its units."""
    means = _block_means(v) * demean
    left = (v.float() - per_token(means, len(v))).abs().amax(0) / constant(E4M3_MAX, v)
    v_scale = torch.maximum(left, means.abs().amax(0) / constant(MEAN_MAX, v))
    v_scale = torch.where(v_scale == 0, torch.ones_like(v_scale), v_scale.clamp_min(1e-30))
    inverse = 1 / v_scale
    stored = (means * inverse).half()
    residual = (v.double() * inverse.double() - per_token(stored.double(), len(v))).float()
    return v_scale, stored, residual


def in_key_order(codes: Tensor) -> Tensor:
    """[D, S_kv_pad] in KEY_ORDER, from one head's codes [S_kv_pad, D]."""
    codes = codes.view(-1, len(KEY_ORDER), HEAD_DIM)[:, list(KEY_ORDER)].reshape(-1, HEAD_DIM)
    return codes.T.contiguous()


def in_mean_order(stored: Tensor) -> Tensor:
    """[D, slots] in MEAN_ORDER with zeros behind the last block, from one head's means [NB, D]."""
    slots = pad(stored, (0, 0, 0, -len(stored) % MEANS_GROUP)).view(-1, MEANS_GROUP, HEAD_DIM)[:, list(MEAN_ORDER)]
    return slots.reshape(-1, HEAD_DIM).T.contiguous()


def in_token_order(codes: Tensor) -> Tensor:
    """[BH, S_kv_pad, D], from [BH, D, S_kv_pad] in KEY_ORDER."""
    groups = codes.unflatten(2, (-1, len(KEY_ORDER)))
    return groups[..., _inverse(KEY_ORDER)].flatten(2).transpose(1, 2)


def decoded_values(operands: HopperOperands) -> Tensor:
    """float32 [BH, S_kv_pad, D]: residuals in units of v_scale, keys in order."""
    return in_token_order(operands.v8.view(torch.float8_e4m3fn).float())


def decoded_means(operands: HopperOperands) -> Tensor:
    """float32 [BH, slots, D]: block means in units of v_scale, blocks in order, zeros behind the last."""
    groups = operands.means.float().unflatten(2, (-1, MEANS_GROUP))
    return groups[..., _inverse(MEAN_ORDER)].flatten(2).transpose(1, 2)


def _inverse(order: tuple[int, ...]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _block_means(v: Tensor) -> Tensor:
    """[NB, D] float32, summed as the kernel does: runs of 16 tokens in order, then pairs."""
    runs = pad_rows(v.float()).view(-1, 4, 2, 16, HEAD_DIM)
    sums = torch.zeros_like(runs[:, :, :, 0])
    for token in range(runs.shape[3]):
        sums = sums + runs[:, :, :, token]
    sums = sums[:, :, 0] + sums[:, :, 1]
    sums = (sums[:, 0] + sums[:, 1]) + (sums[:, 2] + sums[:, 3])
    sizes = (len(v) - torch.arange(0, len(v), BLOCK, device=v.device)).clamp_max(BLOCK)
    return sums / sizes[:, None].float()


def per_token(per_block: Tensor, tokens: int) -> Tensor:
    return per_block.repeat_interleave(BLOCK, 0)[:tokens]


def _half_not_below(x: Tensor) -> Tensor:
    """The smallest half >= x, as float32, for positive x."""
    half = x.half()
    return torch.where(half.float() < x, (half.view(torch.int16) + 1).view(torch.float16), half).float()


def round_to_int8(x: Tensor) -> Tensor:
    return x.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)


def pad_rows(x: Tensor) -> Tensor:
    return pad(x, (0, 0, 0, -len(x) % BLOCK))
