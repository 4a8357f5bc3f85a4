"""Low-bit operands: what an attention kernel reads, independent of how a kernel lays them out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..formats import NVFP4, decode_e4m3
from ..group.blocks import BLOCK


@dataclass(frozen=True)
class ScaledRows:
    """8-bit rows with one scale each: ``value = code * scale``.

    Attributes:
        codes: [B, H, S, D]; int8, or uint8 holding E4M3 bits.
        scale: [B, H, S, 1] float32; equal inside a block where scales are per block.
    """

    codes: Tensor
    scale: Tensor

    def numbers(self) -> Tensor:
        """float32 [B, H, S, D]: the codes as numbers, before the scale."""
        return self.codes.float() if self.codes.is_signed() else decode_e4m3(self.codes)

    def dequantize(self) -> Tensor:
        """float32 [B, H, S, D]."""
        return self.numbers() * self.scale


@dataclass(frozen=True)
class Operands8:
    """Operands of the 8-bit mode. Keys and values are in permuted order; scores are ``q.k`` without softmax scale.

    Attributes:
        q, k: rotated; k without its mean over tokens.
        residual: [B, H, S_kv, D] uint8, E4M3 bits.
        residual_scale: [B, H, 1, D] float32, one per channel.
        means: [B, H, ceil(S_kv / 128), D], 16 bit; None where no means were removed.
    """

    q: ScaledRows
    k: ScaledRows
    residual: Tensor
    residual_scale: Tensor
    means: Tensor | None


@dataclass(frozen=True)
class Operands8Precise:
    """Operands of the precise 8-bit mode; scores are ``q.k`` without softmax scale.

    Attributes:
        q, k: rotated, int8; k without its mean over tokens.
        v: [B, H, S_kv, D], as the caller gave it.
    """

    q: ScaledRows
    k: ScaledRows
    v: Tensor


@dataclass(frozen=True)
class OwnBlock:
    """What each query attends to in 16 bit: the keys j with ``j // 128 == i // 128``, in the order of the sequence.

    Attributes:
        q, k, v: [B, H, S, D] as the caller gave them.
        permutation: [B, H, S] order of the other operands' keys and values, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    permutation: Tensor | None


def has_own_block(q_tokens: int, kv_tokens: int) -> bool:
    """Whether a query has a block of its own among the keys, and others: self-attention of more than one block."""
    return q_tokens == kv_tokens > BLOCK


@dataclass(frozen=True)
class Operands4:
    """Operands of the 4-bit mode. Keys and values are in permuted order.

    Scores are ``(q + q_means) . k``; the part of the block means is exact: ``q.k + q_means.k_exact``.

    Attributes:
        q, k: NVFP4 along the head dimension, rotated; k without its mean over tokens, q without its block means.
        q_means: [B, H, ceil(S_q / 128), D] float32, mean of each block of 128 query rows.
        k_exact: [B, H, S_kv, D] float32, the keys before quantization.
        residual: NVFP4 along the tokens, codes [B, H, D, S_kv].
        means: [B, H, ceil(S_kv / 128), D] float32: block means and what rounding the residual took from them; None
            where no means were removed.
        own: what is attended to in 16 bit and left out of the rest; None: nothing is.
    """

    q: NVFP4
    k: NVFP4
    q_means: Tensor
    k_exact: Tensor
    residual: NVFP4
    means: Tensor | None
    own: OwnBlock | None = None
