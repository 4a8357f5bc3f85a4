"""Quantized operands of an attention call, in one shape for every format, batched in plain torch.

Every number of every low-bit format here is exact in fp16 (INT8, E4M3, and E2M1 times an E4M3 group scale), so a 16-bit
tensor core multiplies the same numbers as an INT8, FP8 or FP4 one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from vc_attention.formats import E4M3_MAX, INT8_MAX, NVFP4_GROUP, nvfp4_scale, positive
from vc_attention.group.blocks import BLOCK, block_means, expand_blocks, permute_tokens
from vc_attention.quantize.nvfp4 import closest_nvfp4, fed_back_nvfp4, key_feedback, query_feedback
from vc_attention.quantize.rotation import rotate

from .formats import Formats
from .own_block import OwnBlock, attend_own, block_of_token

FED_BACK, CLOSEST = "nvfp4, fed back", "nvfp4, closest"


@dataclass(frozen=True)
class Operands:
    """``scores = (q k^T) q_scale k_scale + bias`` in log2 units; ``values = v v_scale + means`` by blocks of 128.

    Attributes:
        q, k, v: [B, H, S, D], numbers before their scales, fp16 or, left as they were, of the inputs' dtype; k and v in
            permuted order.
        q_scale, k_scale: [B, H, S] float32; the softmax scale and log2(e) are in q_scale.
        bias: [B, H, ceil(S_q / 128), S_kv] float32, the exact part of the query means; None without them.
        v_scale: [B, H, ceil(S_kv / 128), D] float32.
        means: [B, H, ceil(S_kv / 128), D] float32; None where none were removed.
        own: what is left out of the scores, and what the recurrence starts with, in the basis of v; None: nothing.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    bias: Tensor | None
    v_scale: Tensor
    means: Tensor | None
    own: OwnBlock | None = None


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    formats: Formats,
    permutation: Tensor | None,
    demean: bool,
    own_order: Tensor | None = None,
) -> Operands:
    """Operands of q, k, v [B, H, S, D] (16 bit) with keys and values in the order of ``permutation`` [B, H, S].

    Args:
        own_order: int64 [S], in which each 128 tokens are one another's own block; None: there is none.
    """
    unit = q.shape[-1] ** -0.5 * math.log2(math.e)
    queries, keys = q.float(), k.float()
    if formats.smooth_keys:
        keys = keys - keys.mean(2, keepdim=True)
    if formats.rotate:
        queries, keys = rotate(queries), rotate(keys)
    exact = queries, keys
    keys = permute_tokens(keys, permutation)
    bias = None
    if formats.qk in ("nvfp4", FED_BACK):
        query_means = block_means(queries)
        queries = queries - expand_blocks(query_means, queries.shape[2])
        bias = (query_means * unit) @ keys.transpose(2, 3)
    if formats.qk == FED_BACK:
        q_numbers, q_scale = fed_back_rows(queries, query_feedback(k))
        k_numbers, k_scale = fed_back_rows(keys, key_feedback(q))
    else:
        q_numbers, q_scale = quantize_rows(queries, formats.qk, formats.qk_scales, (8, 1))
        k_numbers, k_scale = quantize_rows(keys, formats.qk, formats.qk_scales, (4, 2))
    residual, means = split_values(permute_tokens(v, permutation), formats.rotate_values, demean)
    v_numbers, v_scale = quantize_values(residual, formats.values)
    if formats.values == CLOSEST and means is not None:
        means = means + block_means(residual - v_numbers * expand_blocks(v_scale, v.shape[2]))
    own = None
    if own_order is not None:
        # Rounding a query moves its score with its own key by this, and others as far as their keys are like it.
        shift = ((q_numbers.float() * q_scale.unsqueeze(3) - queries) * exact[1]).sum(3) * unit
        total, output = attend_own(*exact, v, shift, own_order)
        blocks = block_of_token(own_order)
        of_keys = blocks.expand(k.shape[:3]) if permutation is None else blocks[permutation.long()]
        own = OwnBlock(blocks, of_keys.contiguous(), total, rotate(output) if formats.rotate_values else output)
    qk_dtype = q.dtype if formats.qk == "16-bit" else torch.float16
    v_dtype = v.dtype if formats.values == "16-bit" else torch.float16
    return Operands(
        q_numbers.to(qk_dtype),
        k_numbers.to(qk_dtype),
        v_numbers.to(v_dtype),
        q_scale * unit,
        k_scale,
        bias,
        v_scale,
        means,
        own,
    )


def split_values(v: Tensor, rotated: bool, demean: bool) -> tuple[Tensor, Tensor | None]:
    """Residual [B, H, S, D] float32 and, if removed, block means as stored in 16 bit."""
    values = rotate(v.float()) if rotated else v.float()
    if not demean:
        return values, None
    stored = torch.bfloat16 if v.dtype == torch.float32 else v.dtype
    means = block_means(values).to(stored).float()
    return values - expand_blocks(means, values.shape[2]), means


def fed_back_rows(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and scales of queries or keys, as `quantize_rows`, by the package's rounding."""
    scale = nvfp4_scale(x, (2, 3))
    if x.is_cuda and x.shape[3] % NVFP4_GROUP == 0:
        from .nvfp4_triton import fed_back_numbers_triton

        numbers = fed_back_numbers_triton(x * (1 / scale), weights)
    else:
        numbers = fed_back_nvfp4(x, scale, weights).numbers()
    return numbers, scale.expand(*x.shape[:3], 1).squeeze(-1).contiguous()


def quantize_rows(x: Tensor, kind: str, groups: str, thread: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Numbers [B, H, S, D] and scales [B, H, S] of queries or keys."""
    if kind == "16-bit":
        return x, torch.ones_like(x[..., 0])
    if kind == "nvfp4":
        scale = nvfp4_scale(x, (2, 3))
        return nvfp4_numbers(x / scale), scale.expand(*x.shape[:3], 1).squeeze(-1).contiguous()
    largest = shared_maxima(x.abs().amax(-1), groups, thread)
    scale = positive(largest / (INT8_MAX if kind == "int8" else E4M3_MAX))
    ratio = x / scale.unsqueeze(-1)
    return (ratio.round() if kind == "int8" else round_e4m3(ratio)), scale


def shared_maxima(row_maxima: Tensor, groups: str, thread: tuple[int, int]) -> Tensor:
    """[B, H, S]: the largest of the rows that share a scale, for every row of ``row_maxima`` [B, H, S].

    ``thread`` = (lanes, neighbours): of every 32 rows of q, thread i has rows i, i + 8, i + 16, i + 24; of every 64
    of k, thread i has 2i and 2i + 1 of each 8.
    """
    tokens = row_maxima.shape[2]
    if groups == "head":
        return row_maxima.amax(2, keepdim=True).expand_as(row_maxima)
    lanes, neighbours = thread if groups == "thread" else (1, 1)
    rows = 128 if groups == "block" else 32 * neighbours
    padded = torch.nn.functional.pad(row_maxima, (0, -tokens % rows))
    tiles = padded.unflatten(2, (-1, rows // (lanes * neighbours), lanes, neighbours))
    return tiles.amax((3, 5), keepdim=True).expand_as(tiles).flatten(2)[..., :tokens]


def quantize_values(residual: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Numbers [B, H, S, D] and scales [B, H, ceil(S / 128), D] of values."""
    tokens = residual.shape[2]
    blocks = -(-tokens // BLOCK)
    if kind == "16-bit":
        return residual, torch.ones_like(residual[:, :, :blocks])
    if kind == CLOSEST:
        scale = nvfp4_scale(residual, (2,))
        return closest_numbers(residual, scale), scale.expand(-1, -1, blocks, -1).contiguous()
    if kind == "nvfp4":
        scale = nvfp4_scale(residual, (2,))
        numbers = nvfp4_numbers((residual / scale).transpose(2, 3)).transpose(2, 3)
        return numbers, scale.expand(-1, -1, blocks, -1).contiguous()
    if kind == "int8 per block":
        padded = torch.nn.functional.pad(residual, (0, 0, 0, -tokens % BLOCK))
        scale = positive(padded.unflatten(2, (-1, BLOCK)).abs().amax(3) / INT8_MAX)
        return (residual / expand_blocks(scale, tokens)).round(), scale
    dims = (2, 3) if kind == "e4m3 per head" else (2,)
    scale = positive(residual.abs().amax(dims, keepdim=True) / (INT8_MAX if kind == "int8" else E4M3_MAX))
    numbers = (residual / scale).round() if kind == "int8" else round_e4m3(residual / scale)
    return numbers, scale.expand(-1, -1, blocks, residual.shape[3]).contiguous()


def closest_numbers(residual: Tensor, scale: Tensor) -> Tensor:
    """Values [B, H, S, D] in NVFP4 along the tokens under ``scale`` [B, H, 1, D], by the package's rounding."""
    along, scale = residual.transpose(2, 3), scale.transpose(2, 3)
    if along.is_cuda and along.shape[3] % NVFP4_GROUP == 0:
        from .nvfp4_triton import nvfp4_numbers_triton

        return nvfp4_numbers_triton(along * (1 / scale), closest=True).transpose(2, 3)
    return closest_nvfp4(along, scale).numbers().transpose(2, 3)


def round_e4m3(x: Tensor) -> Tensor:
    """``x`` rounded to E4M3, saturated at 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def round_e2m1(x: Tensor) -> Tensor:
    """``x`` rounded to E2M1, ties to even, saturated at 6."""
    magnitude = x.abs().clamp_max(6.0)
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.copysign((magnitude / step).round() * step, x)


def nvfp4_numbers(x: Tensor) -> Tensor:
    """NVFP4 along the last dimension, before the FP32 scale: E2M1 times the E4M3 scale of each 16."""
    size = x.shape[-1]
    if x.is_cuda and size % NVFP4_GROUP == 0:
        from .nvfp4_triton import nvfp4_numbers_triton

        return nvfp4_numbers_triton(x)
    groups = torch.nn.functional.pad(x, (0, -size % NVFP4_GROUP)).unflatten(-1, (-1, NVFP4_GROUP))
    scale = round_e4m3(groups.abs().amax(-1, keepdim=True) / 6.0)
    numbers = round_e2m1(groups / torch.where(scale > 0, scale, 1.0)) * scale
    return numbers.flatten(-2)[..., :size]
