"""Operands of the 4-bit Triton attention kernel, and the host side of triton_kernels/prepare4.py that makes them.

``quantize/reference.py`` says what the numbers are; this module says where they lie. Sizes: block = 128 tokens,
NQ and NK blocks of queries and keys, D = 64 or 128.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..arch import family
from ..formats import E2M1_MAX, E4M3_MAX, NVFP4, NVFP4_GROUP, positive
from ..group.blocks import BLOCK
from ..triton_support import LaunchSettings, aligned, is_interpreted, launch, word_strides
from .nvfp4 import DAMPING, SAMPLED_BLOCKS, SCALE_STEPS, sampling
from .operands import Operands4, has_own_block
from .rotation import rotate

HEAD_DIMS = (64, 128)
NATIVE_FAMILIES = ("sm_120", "sm_121")
NVFP4_MAX = E2M1_MAX * E4M3_MAX
# Key at each position of a group of 32: the scores of a thread are then eight neighbouring keys.
KEY_ORDER = tuple(8 * t + 2 * q + e for q in range(4) for t in range(4) for e in range(2))
# Octaves that a score may reach. float32 holds such a number to 2^-7; a head that wants more is shortened as a whole,
# so that a row's maximum never lies above itself by rounding.
MOST_OCTAVES = 2.0**17
SMALLEST_UNIT = 2.0**-100  # products of codes end at 2^30: smaller scores are all equal
MOST_PRODUCT = 1e37  # of queries and keys in float32; beyond it a call is refused like one that is not finite
MOST_BIAS = 1e30  # in units of the product of scales; float32 ends at 3e38
MOST_MEAN = 1e25  # of values in units of their channel's scale; a row sum is up to 2688 a key

PREPARE = LaunchSettings(num_warps=8, num_stages=1)
REGISTERS = 128  # of a thread: two programs of 8 warps then share a multiprocessor
ROUND = LaunchSettings(num_warps=4, num_stages=1)  # rounds rows of queries and keys
ROUND_ROWS = 64
ROUND_REGISTERS = 168  # three programs of 4 warps; with 128 registers they spill
BIAS = LaunchSettings(num_warps=8, num_stages=2)
BIAS_ROWS = 64


@dataclass(frozen=True)
class ScoreBias:
    """What scores lose with the block means of the queries: ``((high + low) keys^T - constant) unit``.

    Attributes:
        high, low: [BH, NQ, D] of the keys' dtype; their sum is a block's mean, to about 16 bits.
        constant: float32 [BH, NQ]: the part of the mean over keys, the same for a whole row of scores.
        keys: [B, H, S_kv, D] in the order of the sequence, any strides; neither rotated nor without their mean.
        permutation: int32 [B, H, S_kv] or None: the order of the keys.
        unit: float32 [BH]: units of the quantized product per unit of score.
    """

    high: Tensor
    low: Tensor
    constant: Tensor
    keys: Tensor
    permutation: Tensor | None
    unit: Tensor


@dataclass(frozen=True)
class TritonOwnBlock:
    """What attention to the own block in 16 bit needs besides the packed queries (attend/own_block.py).

    Attributes:
        q, k, v: [B, H, S, D], 16 bit, in the order of the sequence; any strides in words of 16 bytes.
        q_means: float32 [BH, NQ, D]: block means of q, rotated, times ``sign``.
        key_mean: float32 [BH, D], rotated.
        q_scale: float32 [BH]: of the packed queries.
        octaves: float32 [BH], per unit of ``q k^T``.
        sign: of the softmax scale, which the packed queries and ``q_means`` have inside: 1, 0 or -1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_means: Tensor
    key_mean: Tensor
    q_scale: Tensor
    octaves: Tensor
    sign: float


@dataclass(frozen=True)
class TritonOperands4:
    """Quantized operands of one call; BH = B * H, head index b * H + h. Keys and values are in permuted order.

    Attributes:
        q, k: uint8 [BH, blocks * 128, D / 2]: E2M1, channel 2 i in bits 0 to 3 of byte i. Rows of k in KEY_ORDER
            inside each group of 32. Padding rows are zero.
        q_scales, k_scales: uint8 [BH, blocks * 128, D / 16], UE4M3 bits.
        v: uint8 [BH, NK, D, 64]: E2M1 of the residual, key 2 i of the block in bits 0 to 3 of byte i.
        v_scales: uint8 [BH, NK, D, 8].
        v_scale: float32 [BH, D].
        means: float32 [BH, NK, D], the reference's means in units of v_scale; None where no means were removed.
        score_scale: float32 [BH]: octaves per unit of ``q k^T``.
        bias: starts the scores.
        own: what is attended to in 16 bit, which the bias then leaves out; None: nothing is.
        q_tokens: S_q.
        flags: int32 [1]: bit 0, some q, k or v is not finite, or products of q and k could pass MOST_PRODUCT.
    """

    q: Tensor
    q_scales: Tensor
    k: Tensor
    k_scales: Tensor
    v: Tensor
    v_scales: Tensor
    v_scale: Tensor
    means: Tensor | None
    score_scale: Tensor
    bias: ScoreBias
    own: TritonOwnBlock | None
    q_tokens: int
    flags: Tensor

    @property
    def q_blocks(self) -> int:
        return self.q.shape[1] // BLOCK

    @property
    def kv_blocks(self) -> int:
        return self.v.shape[1]


def emulates(device) -> bool:
    """Whether kernels must do without Blackwell's 4-bit instructions on ``device``."""
    return is_interpreted() or family(device) not in NATIVE_FAMILIES


def prepare4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    permutation: Tensor | None = None,
    demean: bool = True,
    own_block: bool = False,
) -> TritonOperands4:
    """Operands of one call, on the tensors' device and torch's current stream, without synchronizing.

    Args:
        q: [B, H, S_q, D], k, v: [B, H, S_kv, D]; bf16 or fp16, any strides, D of HEAD_DIMS.
        scale: softmax scale; its sign goes into q.
        permutation: int32 [B, H, S_kv], the token at each position of the order; None keeps the sequence.
        demean: False removes no block means.
        own_block: whether the own block is attended to in 16 bit, where the call has such.
    """
    q, k, v = (aligned(x) for x in (q, k, v))
    permutation = None if permutation is None else permutation.to(torch.int32).contiguous()
    sign = float((scale > 0) - (scale < 0))
    queries = _Rows(q, None, sign)
    keys = _Rows(k, permutation, 1.0)
    key_mean = k.mean(2, dtype=torch.float32).flatten(0, 1)
    turned_mean = rotate(key_mean)
    q_means, turned_q_means, q_largest = _query_maxima(queries)
    k_largest = _key_maxima(keys, turned_mean)
    means, v_scale, v_largest = _value_maxima(v, permutation, demean)

    # A score is at most D times the largest of its factors. The bias is made with keys that still have their mean.
    mean_bound = q.shape[3] * q_means.abs().amax((1, 2)).double()
    bias_bound = mean_bound * k_largest
    key_bound = k_largest + turned_mean.abs().amax(1)
    representable = mean_bound * key_bound < MOST_PRODUCT
    own_block = own_block and has_own_block(q.shape[2], k.shape[2])
    if own_block:  # it multiplies q and k as they are
        q_mean_largest = turned_q_means.abs().amax((1, 2)).double()
        representable &= q.shape[3] * (q_largest + q_mean_largest) * key_bound < MOST_PRODUCT
    score_bound = (q.shape[3] * q_largest.double() * k_largest + bias_bound) * (abs(scale) * math.log2(math.e))
    k_scale = positive(k_largest / NVFP4_MAX)
    q_scale = torch.maximum(positive(q_largest / NVFP4_MAX), (bias_bound / (k_scale * MOST_BIAS)).float())
    unit = (q_scale.double() * k_scale).clamp_min(SMALLEST_UNIT)
    shortened = (MOST_OCTAVES / score_bound).clamp_max(1.0)
    octaves = (unit * (abs(scale or 1.0) * math.log2(math.e)) * shortened).clamp_min(SMALLEST_UNIT)
    finite = torch.stack([*(x.isfinite().all() for x in (q_largest, k_largest, v_largest)), representable.all()])
    q_codes, q_scales = _quantize_queries(queries, turned_q_means, q_scale, _feedback(keys, k_scale, between=True))
    k_codes, k_scales = _quantize_keys(keys, turned_mean, k_scale, _feedback(queries, q_scale, between=False))
    v_codes, v_scales, unit_means = _quantize_values(v, permutation, demean, means, v_scale)
    per_score = (octaves / unit).float()
    own_q = q if sign else torch.zeros_like(q)  # products as they are could overflow, and 0 times infinity is NaN
    own = TritonOwnBlock(own_q, k, v, turned_q_means, turned_mean, q_scale, per_score, sign) if own_block else None
    return TritonOperands4(
        q=q_codes,
        q_scales=q_scales,
        k=k_codes,
        k_scales=k_scales,
        v=v_codes,
        v_scales=v_scales,
        v_scale=v_scale,
        means=unit_means,
        score_scale=octaves.float(),
        bias=_score_bias(q_means, k, permutation, key_mean, unit),
        own=own,
        q_tokens=q.shape[2],
        flags=(~finite.all()).to(torch.int32).reshape(1),
    )


def _score_bias(q_means: Tensor, keys: Tensor, permutation: Tensor | None, key_mean: Tensor, unit: Tensor) -> ScoreBias:
    high = q_means.to(keys.dtype)
    low = (q_means - high.float()).to(keys.dtype)
    constant = (q_means * key_mean[:, None]).sum(2)
    return ScoreBias(high, low, constant, keys, permutation, (1 / unit).float())


def score_bias(operands: TritonOperands4, heads: range, blocks: range) -> Tensor:
    """float32 [heads, blocks, NK * 128], keys in KEY_ORDER: the bias of some scores.

    It is minus infinity for padding keys and for those that are attended to in 16 bit.

    Args:
        heads: of B * H.
        blocks: query blocks.
    """
    from ..triton_kernels.prepare4 import bias_kernel

    source, kv_blocks = operands.bias, operands.kv_blocks
    keys = source.keys
    bias = torch.empty(len(heads), len(blocks), kv_blocks * BLOCK, dtype=torch.float32, device=keys.device)
    launch(
        bias_kernel,
        keys.device,
        len(heads) * kv_blocks,
        source.high,
        source.low,
        source.constant,
        keys,
        _order(source.permutation, keys),
        source.unit,
        bias,
        heads.start,
        blocks.start,
        keys.shape[1],
        keys.shape[2],
        operands.q_blocks,
        kv_blocks,
        len(blocks),
        *word_strides(keys),
        D=keys.shape[3],
        PERMUTED=source.permutation is not None,
        OWN=operands.own is not None,
        ROWS=BIAS_ROWS,
        EMULATE=emulates(keys.device),
        settings=BIAS,
    )
    return bias


class _Rows:
    """q or k as the kernels take it: sizes, strides and the factor of the rotation."""

    def __init__(self, x: Tensor, permutation: Tensor | None, sign: float):
        self.x, self.device, self.permutation = x, x.device, permutation
        self.batch_heads, self.head_dim = x.shape[0] * x.shape[1], x.shape[3]
        self.blocks = -(-x.shape[2] // BLOCK)
        self.grid = self.batch_heads * self.blocks
        self.sizes = (x.shape[1], x.shape[2], self.blocks, *word_strides(x), sign * self.head_dim**-0.5)

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def packed(self) -> tuple[Tensor, Tensor]:
        """Memory for codes and group scales."""
        rows = (self.batch_heads, self.blocks * BLOCK)
        codes = self.new(*rows, self.head_dim // 2, dtype=torch.uint8)
        return codes, self.new(*rows, self.head_dim // NVFP4_GROUP, dtype=torch.uint8)


def _order(permutation: Tensor | None, like: Tensor) -> Tensor:
    """A pointer for the kernel, which looks behind it only where there is a permutation."""
    return torch.empty(1, dtype=torch.int32, device=like.device) if permutation is None else permutation


def _query_maxima(rows: _Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Block means [BH, NQ, D], the same rotated, and the largest magnitude without them [BH]."""
    from ..triton_kernels.prepare4 import query_maxima_kernel

    means = rows.new(rows.batch_heads, rows.blocks, rows.head_dim)
    turned_means = torch.empty_like(means)
    maxima = rows.new(rows.batch_heads, rows.blocks)
    launch(
        query_maxima_kernel,
        rows.device,
        rows.grid,
        rows.x,
        means,
        turned_means,
        maxima,
        *rows.sizes,
        D=rows.head_dim,
        EMULATE=emulates(rows.device),
        settings=PREPARE,
        maxnreg=REGISTERS,
    )
    return means, turned_means, maxima.amax(1)


def _feedback(rows: _Rows, scale: Tensor, between: bool) -> Tensor:
    """float16 [BH, D, D]: `feedback` for what is multiplied with ``rows``, whose ``scale`` [BH] is any such unit.

    Args:
        between: whether the means of the blocks are part of the rows' covariance.
    """
    from ..triton_kernels.feedback4 import covariance_kernel, feedback_kernel

    heads, tokens = rows.x.shape[1:3]
    samples, step = sampling(tokens)
    size = rows.head_dim
    covariances = rows.new(rows.batch_heads, samples, size, size)
    means = rows.new(rows.batch_heads, samples, size)
    launch(
        covariance_kernel,
        rows.device,
        rows.batch_heads * samples,
        rows.x,
        scale,
        covariances,
        means,
        heads,
        tokens,
        samples,
        step,
        *word_strides(rows.x),
        size**-0.5,
        D=size,
        EMULATE=emulates(rows.device),
        settings=PREPARE,
    )
    weights = rows.new(rows.batch_heads, size, size, dtype=torch.float16)
    launch(
        feedback_kernel,
        rows.device,
        rows.batch_heads,
        covariances,
        means,
        weights,
        tokens,
        samples,
        DAMPING,
        D=size,
        BETWEEN=between,
        SAMPLES=SAMPLED_BLOCKS,
        settings=PREPARE,
    )
    return weights


def _quantize_queries(rows: _Rows, means: Tensor, scale: Tensor, feedback: Tensor) -> tuple[Tensor, Tensor]:
    from ..triton_kernels.prepare4 import queries4_kernel

    codes, scales = rows.packed()
    launch(
        queries4_kernel,
        rows.device,
        rows.grid * (BLOCK // ROUND_ROWS),
        rows.x,
        means,
        scale,
        feedback,
        codes,
        scales,
        len(SCALE_STEPS),
        *rows.sizes,
        D=rows.head_dim,
        EMULATE=emulates(rows.device),
        ROWS=ROUND_ROWS,
        settings=ROUND,
        maxnreg=ROUND_REGISTERS,
    )
    return codes, scales


def _key_maxima(rows: _Rows, mean: Tensor) -> Tensor:
    from ..triton_kernels.prepare4 import key_maxima_kernel

    maxima = rows.new(rows.batch_heads, rows.blocks)
    launch(
        key_maxima_kernel,
        rows.device,
        rows.grid,
        rows.x,
        _order(rows.permutation, rows.x),
        mean,
        maxima,
        *rows.sizes,
        D=rows.head_dim,
        PERMUTED=rows.permutation is not None,
        EMULATE=emulates(rows.device),
        settings=PREPARE,
        maxnreg=REGISTERS,
    )
    return maxima.amax(1)


def _quantize_keys(rows: _Rows, mean: Tensor, scale: Tensor, feedback: Tensor) -> tuple[Tensor, Tensor]:
    from ..triton_kernels.prepare4 import keys4_kernel

    codes, scales = rows.packed()
    launch(
        keys4_kernel,
        rows.device,
        rows.grid * (BLOCK // ROUND_ROWS),
        rows.x,
        _order(rows.permutation, rows.x),
        mean,
        scale,
        feedback,
        codes,
        scales,
        len(SCALE_STEPS),
        *rows.sizes,
        D=rows.head_dim,
        PERMUTED=rows.permutation is not None,
        EMULATE=emulates(rows.device),
        ROWS=ROUND_ROWS,
        settings=ROUND,
        maxnreg=ROUND_REGISTERS,
    )
    return codes, scales


def _value_maxima(v: Tensor, permutation: Tensor | None, demean: bool) -> tuple[Tensor, Tensor, Tensor]:
    from ..triton_kernels.prepare4 import value_maxima_kernel

    rows = _Rows(v, permutation, 1.0)
    maxima = rows.new(rows.batch_heads, rows.blocks, rows.head_dim)
    means = torch.empty_like(maxima)
    launch(
        value_maxima_kernel,
        rows.device,
        rows.grid,
        v,
        _order(permutation, v),
        means,
        maxima,
        *rows.sizes[:-1],
        D=rows.head_dim,
        PERMUTED=permutation is not None,
        DEMEAN=demean,
        settings=PREPARE,
    )
    largest = maxima.amax(1)
    scale = positive(largest / NVFP4_MAX)
    if demean:
        scale = torch.maximum(scale, means.abs().amax(1) / MOST_MEAN)
    return means, scale, largest


def _quantize_values(
    v: Tensor, permutation: Tensor | None, demean: bool, means: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    from ..triton_kernels.prepare4 import values4_kernel

    rows = _Rows(v, permutation, 1.0)
    tiles = (rows.batch_heads, rows.blocks, rows.head_dim)
    codes = rows.new(*tiles, BLOCK // 2, dtype=torch.uint8)
    scales = rows.new(*tiles, BLOCK // NVFP4_GROUP, dtype=torch.uint8)
    unit_means = torch.empty_like(means)
    launch(
        values4_kernel,
        rows.device,
        rows.grid,
        v,
        _order(permutation, v),
        means,
        scale,
        unit_means,
        codes,
        scales,
        len(SCALE_STEPS),
        *rows.sizes[:-1],
        D=rows.head_dim,
        PERMUTED=permutation is not None,
        DEMEAN=demean,
        EMULATE=emulates(v.device),
        settings=PREPARE,
        maxnreg=REGISTERS,
    )
    return codes, scales, unit_means if demean else None


def lay_out(operands: Operands4, scale: float) -> TritonOperands4:
    """The reference's operands in this layout: the specification of the preparation. ``scale`` must be positive."""
    batch, heads, tokens, head_dim = operands.k_exact.shape
    q, q_scales = _packed_rows(operands.q)
    k, k_scales = (_in_key_order(x) for x in _packed_rows(operands.k))
    v, v_scales = _packed_tiles(operands.residual)
    v_scale = operands.residual.scale.reshape(-1, head_dim)
    unit = (operands.q.scale.double() * operands.k.scale.double()).flatten()
    octaves = torch.full_like(unit, scale * math.log2(math.e))
    means = operands.means
    no_mean = torch.zeros(batch * heads, head_dim, dtype=torch.float32, device=q.device)
    return TritonOperands4(
        q=q,
        q_scales=q_scales,
        k=k,
        k_scales=k_scales,
        v=v,
        v_scales=v_scales,
        v_scale=v_scale,
        means=None if means is None else means.float().flatten(0, 1) / v_scale[:, None],
        score_scale=(unit * octaves).float(),
        bias=_score_bias(operands.q_means.flatten(0, 1), *_in_sequence(operands), no_mean, unit),
        own=None if operands.own is None else _own_block(operands, octaves.float()),
        q_tokens=operands.q.codes.shape[2],
        flags=torch.zeros(1, dtype=torch.int32, device=q.device),
    )


def _in_sequence(operands: Operands4) -> tuple[Tensor, Tensor | None]:
    """Keys before quantization and their order; the keys as they lie where nothing needs to know their tokens."""
    permutation = None if operands.own is None else operands.own.permutation
    if permutation is None:
        return operands.k_exact, None
    index = permutation.long().unsqueeze(-1).expand_as(operands.k_exact)
    return torch.empty_like(operands.k_exact).scatter_(2, index, operands.k_exact), permutation


def _own_block(operands: Operands4, octaves: Tensor) -> TritonOwnBlock:
    own = operands.own
    return TritonOwnBlock(
        q=own.q,
        k=own.k,
        v=own.v,
        q_means=operands.q_means.flatten(0, 1).contiguous(),
        key_mean=rotate(own.k.mean(2, dtype=torch.float32).flatten(0, 1)),
        q_scale=operands.q.scale.flatten(),
        octaves=octaves,
        sign=1.0,
    )


def _packed_rows(x: NVFP4) -> tuple[Tensor, Tensor]:
    """Codes and group scales of [B, H, S, D] as [BH, blocks * 128, ...]."""
    return _pad_tokens(_pack(x.codes).flatten(0, 1)), _pad_tokens(x.group_scales.flatten(0, 1))


def _packed_tiles(x: NVFP4) -> tuple[Tensor, Tensor]:
    """Codes and group scales of [B, H, D, S], along the tokens, as [BH, NK, D, ...]."""
    codes, scales = x.codes.flatten(0, 1), x.group_scales.flatten(0, 1)
    codes = _pack(pad(codes, (0, -codes.shape[2] % BLOCK)))
    scales = pad(scales, (0, -scales.shape[2] % (BLOCK // NVFP4_GROUP)))
    parts = [(codes, BLOCK // 2), (scales, BLOCK // NVFP4_GROUP)]
    return tuple(part.unflatten(2, (-1, size)).transpose(1, 2).contiguous() for part, size in parts)


def _pack(codes: Tensor) -> Tensor:
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _pad_tokens(x: Tensor) -> Tensor:
    return pad(x, (0, 0, 0, -x.shape[1] % BLOCK))


def _in_key_order(x: Tensor) -> Tensor:
    return x.unflatten(1, (-1, len(KEY_ORDER)))[:, :, list(KEY_ORDER)].flatten(1, 2)
