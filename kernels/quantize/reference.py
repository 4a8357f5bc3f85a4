"""Quantization in plain torch: the specification of the preparation kernels (method, sections 1 and 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import E4M3_MAX, INT8_MAX, encode_e4m3, nvfp4_scale, positive
from ..group.blocks import (
    BLOCK,
    ValueBlocks,
    block_means,
    demean,
    expand_blocks,
    keep_means,
    permute_tokens,
)
from .nvfp4 import closest_nvfp4, fed_back_nvfp4, key_feedback, query_feedback
from .operands import Operands4, Operands8, Operands8Precise, OwnBlock, ScaledRows, has_own_block
from .rotation import rotate


def quantize8(q: Tensor, k: Tensor, v: Tensor, permutation: Tensor | None, qk_format: str, remove_means: bool):
    """Operands of the 8-bit mode from q [B, H, S_q, D] and k, v [B, H, S_kv, D].

    Args:
        permutation: [B, H, S_kv] order of keys and values, or None.
        qk_format: "int8" or "e4m3", one scale per block of 128 tokens.
        remove_means: whether block means of v are removed.
    """
    blocks = split_values(permute_tokens(v, permutation), remove_means)
    scale = positive(blocks.residual.abs().amax(2, keepdim=True) / E4M3_MAX)
    return Operands8(
        q=scaled_rows(rotate(q), qk_format),
        k=scaled_rows(permute_tokens(smooth_keys(k), permutation), qk_format),
        residual=encode_e4m3(blocks.residual / scale),
        residual_scale=scale,
        means=blocks.means,
    )


def quantize8_precise(q: Tensor, k: Tensor, v: Tensor) -> Operands8Precise:
    """Operands of the precise 8-bit mode from q [B, H, S_q, D] and k, v [B, H, S_kv, D]."""
    return Operands8Precise(q=scaled_rows(rotate(q), "int8"), k=scaled_rows(smooth_keys(k), "int8"), v=v)


def quantize4(
    q: Tensor, k: Tensor, v: Tensor, permutation: Tensor | None, remove_means: bool, own_block: bool = False
) -> Operands4:
    """Operands of the 4-bit mode from q [B, H, S_q, D] and k, v [B, H, S_kv, D].

    A block mean takes up the mean of its residual's rounding errors: keys of equal probability then lose nothing.

    Args:
        permutation, remove_means: as in ``quantize8``.
        own_block: whether the own block is attended to in 16 bit, where the call has such.
    """
    blocks = split_values(permute_tokens(v, permutation), remove_means)
    queries, q_means = smooth_queries(rotate(q))
    keys = permute_tokens(smooth_keys(k), permutation)
    exact = blocks.residual.transpose(2, 3)
    residual = closest_nvfp4(exact, nvfp4_scale(exact, (3,)))
    lost = block_means((exact - residual.dequantize()).transpose(2, 3))
    return Operands4(
        q=fed_back_nvfp4(queries, nvfp4_scale(queries, (2, 3)), query_feedback(k)),
        k=fed_back_nvfp4(keys, nvfp4_scale(keys, (2, 3)), key_feedback(q)),
        q_means=q_means,
        k_exact=keys,
        residual=residual,
        means=None if blocks.means is None else blocks.means.float() + lost,
        own=OwnBlock(q, k, v, permutation) if own_block and has_own_block(q.shape[2], k.shape[2]) else None,
    )


def split_values(v: Tensor, remove_means: bool) -> ValueBlocks:
    """Block means and residual of permuted values [B, H, S_kv, D]."""
    return demean(v) if remove_means else keep_means(v)


def smooth_keys(k: Tensor) -> Tensor:
    """Rotated keys without their mean over tokens; a row of scores loses a constant, which softmax does not see."""
    return rotate(k.double() - k.mean(2, keepdim=True, dtype=torch.float64))


def smooth_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """Queries without the mean of each block of 128 rows, and those means [B, H, ceil(S_q / 128), D]."""
    means = block_means(q)
    return q - expand_blocks(means, q.shape[2]), means


def scaled_rows(x: Tensor, qk_format: str) -> ScaledRows:
    """8-bit codes of ``x`` [B, H, S, D], one scale per block of 128 tokens."""
    largest = INT8_MAX if qk_format == "int8" else E4M3_MAX
    scale = expand_blocks(positive(block_maxima(x) / largest), x.shape[2])
    ratio = x / scale
    if qk_format == "int8":
        return ScaledRows(torch.round(ratio).clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale)
    return ScaledRows(encode_e4m3(ratio), scale)


def block_maxima(x: Tensor) -> Tensor:
    """[B, H, ceil(S / 128), 1]: largest magnitude in each block of ``x`` [B, H, S, D]."""
    padded = torch.nn.functional.pad(x.abs(), (0, 0, 0, -x.shape[2] % BLOCK))
    return padded.unflatten(2, (-1, BLOCK)).amax((3, 4)).unsqueeze(3)
