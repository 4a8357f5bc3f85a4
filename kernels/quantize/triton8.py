"""Operands of the portable 8-bit attention kernel: their layout, how Triton makes them, and from the reference's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..formats import CODES_PER_OCTAVE, E4M3_MAX, positive
from ..group.blocks import BLOCK, expand_blocks
from ..triton_support import LaunchSettings, is_interpreted, launch, word_strides
from .operands import Operands8, ScaledRows
from .rotation import hadamard_matrix

_QUAD = tuple(key for c in range(4) for key in (2 * c, 2 * c + 1, 8 + 2 * c, 9 + 2 * c))
KEY_ORDER = _QUAD + tuple(16 + key for key in _QUAD)  # key at each position of a group of 32, where values are stored
CODES_PER_NAT = CODES_PER_OCTAVE * math.log2(math.e)
MEAN_ROWS = 16  # as in the kernel
MEAN_MAX = 1e30  # of a mean in units of its channel's scale
SETTINGS = LaunchSettings(num_warps=8, num_stages=1)


@dataclass(frozen=True)
class TritonOperands8:
    """Quantized operands; NQ and NB are S_q and S_kv in blocks of 128, behind the last token all is zero.

    Attributes:
        q, k: [B, H, NQ or NB, BLOCK, D] uint8, int8 codes or E4M3 bits; rotated, k without its mean over tokens.
        q_scale: [B, H, NQ] float32, codes (1/8 octave) per unit of q.k where k's scale is 1; not negative.
        k_scale: [B, H, NB] float32.
        residual: [B, H, NB, D, BLOCK] uint8, E4M3 bits, keys in KEY_ORDER.
        residual_scale: [B, H, D] float32.
        means: [B, H, NB, MEAN_ROWS, D] bf16 in units of residual_scale, as ``_mean_rows`` makes them; None where no
            means were removed.
        int8: whether q and k are int8.
        tokens: S_kv.
        flags: [1] int32, bit 0: some q, k or v is not finite; None for operands made from the reference's.
    """

    q: Tensor
    k: Tensor
    q_scale: Tensor
    k_scale: Tensor
    residual: Tensor
    residual_scale: Tensor
    means: Tensor | None
    int8: bool
    tokens: int
    flags: Tensor | None = None


def prepare8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    permutation: Tensor | None = None,
    qk_format: str = "int8",
    demean: bool = True,
) -> TritonOperands8:
    """Operands of one call, on the tensors' device and torch's current stream, without synchronizing.

    Args:
        q: [B, H, S_q, D], k, v: [B, H, S_kv, D]; bf16 or fp16, 16-byte aligned rows, any strides.
        scale: softmax scale.
        permutation: contiguous int32 [B, H, S_kv], the token at each position of the order; None keeps the sequence.
        qk_format: "int8" or "e4m3".
        demean: False takes all block means as zero.
    """
    flags = torch.zeros(1, dtype=torch.int32, device=q.device)
    int8 = qk_format == "int8"
    codes_per_unit = CODES_PER_NAT * abs(scale)
    sign = -1.0 if scale < 0 else 1.0
    mean = (k.mean(2, dtype=torch.float32).double() @ _signs(k.shape[3], torch.float64, k.device)).float()
    q8, q_scale = _quantize_rows(q, None, None, int8, flags, sign, codes_per_unit)
    k8, k_scale = _quantize_rows(k, mean, permutation, int8, flags, 1.0, 1.0)
    residual, residual_scale, means = _quantize_values(v, permutation, demean, flags)
    return TritonOperands8(
        q8, k8, q_scale, k_scale, residual, residual_scale, means, int8=int8, tokens=k.shape[2], flags=flags
    )


def from_reference(operands: Operands8, scale: float) -> TritonOperands8:
    """The reference's operands in this layout, for comparing the attention kernel alone."""
    int8 = operands.q.codes.is_signed()
    q, k = operands.q.codes, operands.k.codes
    if scale < 0:
        q = -q if int8 else q ^ 0x80
    keys = _blocks(operands.residual).unflatten(3, (-1, len(KEY_ORDER)))[:, :, :, :, list(KEY_ORDER)].flatten(3, 4)
    means = operands.means
    if means is not None:
        means = _mean_rows(means.float() / operands.residual_scale)
    return TritonOperands8(
        q=_blocks(q).view(torch.uint8),
        k=_blocks(k).view(torch.uint8),
        q_scale=operands.q.scale[:, :, ::BLOCK, 0] * (CODES_PER_NAT * abs(scale)),
        k_scale=operands.k.scale[:, :, ::BLOCK, 0].contiguous(),
        residual=keys.transpose(3, 4).contiguous(),
        residual_scale=operands.residual_scale[:, :, 0].contiguous(),
        means=means,
        int8=int8,
        tokens=k.shape[2],
    )


def to_reference(operands: TritonOperands8, q_tokens: int, scale: float) -> Operands8:
    """The operands as the reference takes them, for calls with the same ``scale``, not 0."""
    tokens = operands.tokens
    codes_dtype = torch.int8 if operands.int8 else torch.uint8
    q, k = (x.flatten(2, 3).view(codes_dtype) for x in (operands.q, operands.k))
    if scale < 0:
        q = -q if operands.int8 else q ^ 0x80
    q_scale = expand_blocks(operands.q_scale[..., None] / (CODES_PER_NAT * abs(scale)), q_tokens)
    order = sorted(range(len(KEY_ORDER)), key=KEY_ORDER.__getitem__)
    residual = operands.residual.transpose(3, 4).unflatten(3, (-1, len(KEY_ORDER)))[:, :, :, :, order].flatten(2, 4)
    means = operands.means
    if means is not None:
        means = (means[:, :, :, 0].float() + means[:, :, :, 1].float()) * operands.residual_scale[:, :, None]
    return Operands8(
        q=ScaledRows(q[:, :, :q_tokens], q_scale),
        k=ScaledRows(k[:, :, :tokens], expand_blocks(operands.k_scale[..., None], tokens)),
        residual=residual[:, :, :tokens],
        residual_scale=operands.residual_scale[:, :, None],
        means=means,
    )


def _quantize_rows(x, mean, permutation, int8, flags, sign, codes_per_unit) -> tuple[Tensor, Tensor]:
    from ..triton_kernels.prepare8 import quantize_rows_kernel

    batch, heads, tokens, head_dim = x.shape
    blocks = -(-tokens // BLOCK)
    codes = torch.empty(batch, heads, blocks, BLOCK, head_dim, dtype=torch.uint8, device=x.device)
    scale = torch.empty(batch, heads, blocks, dtype=torch.float32, device=x.device)
    launch(
        quantize_rows_kernel,
        x.device,
        batch * heads * blocks,
        *(x, _or(permutation, flags), _signs(head_dim, x.dtype, x.device), _or(mean, scale), codes, scale, flags),
        *(heads, tokens, *word_strides(x), head_dim**-0.5, sign, codes_per_unit),
        settings=SETTINGS,
        D=head_dim,
        INT8=int8,
        CENTRE=mean is not None,
        GATHER=permutation is not None,
        EMULATE=is_interpreted(),
    )
    return codes, scale


def _quantize_values(v, permutation, demean, flags) -> tuple[Tensor, Tensor, Tensor | None]:
    from ..triton_kernels.prepare8 import quantize_values_kernel, value_blocks_kernel

    batch, heads, tokens, head_dim = v.shape
    blocks = -(-tokens // BLOCK)
    grid = batch * heads * blocks
    means = torch.empty(batch, heads, blocks, head_dim, dtype=v.dtype, device=v.device)
    maxima = torch.empty(batch, heads, blocks, head_dim, dtype=torch.float32, device=v.device)
    codes = torch.empty(batch, heads, blocks, head_dim, BLOCK, dtype=torch.uint8, device=v.device)
    order = _or(permutation, flags)
    shape = (heads, tokens, *word_strides(v))
    constants = {
        "D": head_dim,
        "MEANS": demean,
        "GATHER": permutation is not None,
        "EMULATE": is_interpreted(),
    }
    launch(value_blocks_kernel, v.device, grid, v, order, means, maxima, flags, *shape, settings=SETTINGS, **constants)
    scale = positive(maxima.amax(2) / E4M3_MAX)
    if demean:
        scale = torch.maximum(scale, means.abs().amax(2) / MEAN_MAX)
    launch(
        quantize_values_kernel,
        v.device,
        grid,
        *(v, order, means, scale, codes, *shape),
        settings=SETTINGS,
        **constants,
    )
    return codes, scale, _mean_rows(means.float() / scale[:, :, None]) if demean else None


def _mean_rows(means: Tensor) -> Tensor:
    """Means [B, H, NB, D] as the right factor of a product of bf16: high part, low part, high part, zeros."""
    rows = means.new_zeros((*means.shape[:3], MEAN_ROWS, means.shape[3]), dtype=torch.bfloat16)
    rows[:, :, :, 0] = rows[:, :, :, 2] = means
    rows[:, :, :, 1] = means - rows[:, :, :, 0].float()
    return rows


@cache  # one made anew in a graph capture would lie in the graph's memory
def _signs(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.sign(hadamard_matrix(size, device)).to(dtype)


def _or(tensor: Tensor | None, unread: Tensor) -> Tensor:
    """A pointer for a parameter that the kernel does not read."""
    return unread if tensor is None else tensor


def _blocks(x: Tensor) -> Tensor:
    """[B, H, S, D] -> [B, H, N, BLOCK, D], zeros behind the last token."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % BLOCK)).unflatten(2, (-1, BLOCK)).contiguous()
