"""Preparation for 4-bit attention: from 16-bit q, k, v of any strides to packed NVFP4 (quantize/triton4.py).

One program: one block of 128 tokens of one head. Two passes over each tensor, since one FP32 scale serves a whole head
(q, k) or channel (v): the first finds what the scale depends on, the second quantizes. Rows are rotated by a product
with the matrix of signs, exact in 16 bit, and scaled by ``D ** -0.5`` afterwards.
"""

import triton
import triton.language as tl

from .nvfp4 import bits_of_ue4m3, pack_e2m1, round_ue4m3

BLOCK = tl.constexpr(128)
WORD = tl.constexpr(8)  # strides are in words of 8 elements, so that Triton sees that rows are 16-byte aligned


@triton.jit
def sign_matrix(D: tl.constexpr, dtype: tl.constexpr):
    """[D, D] Hadamard matrix of +-1: element (i, j) is negative where ``i & j`` has an odd number of bits."""
    common = tl.arange(0, D)[:, None] & tl.arange(0, D)[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    return (1 - 2 * (common & 1)).to(tl.float32).to(dtype)


@triton.jit
def key_at(position):
    """Key stored at a position: inside a group of 32, position 8 q + 2 t + e holds key 8 t + 2 q + e."""
    return (position & ~31) | ((position & 6) << 2) | ((position & 24) >> 2) | (position & 1)


@triton.jit
def finite_or_infinite(x):
    """``|x|``, with infinity in place of NaN: a maximum then shows both."""
    magnitude = tl.abs(x)
    return tl.where(magnitude < float("inf"), magnitude, float("inf"))


@triton.jit
def gathered(p_permutation, i_head, token, mask, tokens, PERMUTED: tl.constexpr):
    """Where in the sequence the tokens of an order are."""
    if PERMUTED:
        return tl.load(p_permutation + i_head.to(tl.int64) * tokens + token, mask=mask, other=0)
    else:
        return token


@triton.jit
def load_rows(p_x, i_head, token, mask, heads, stride_b, stride_h, stride_s, D: tl.constexpr):
    """[rows, D] of x [B, H, S, D] in its own dtype; rows outside the mask are zero."""
    start = i_head // heads * stride_b + i_head % heads * stride_h
    p_row = p_x + (start + token.to(tl.int64) * stride_s) * WORD
    return tl.load(p_row[:, None] + tl.arange(0, D)[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def product(a, b, c, EMULATE: tl.constexpr):
    """``c + a b`` in float32 for a and b of one dtype; emulated by TF32, which holds 16-bit numbers exactly."""
    if a.dtype == tl.float32:  # only the reference's operands
        return tl.dot(a, b, c, input_precision="tf32x3")
    elif EMULATE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="tf32")
    else:
        return tl.dot(a, b, c)


@triton.jit
def rotated(x, factor, D: tl.constexpr, EMULATE: tl.constexpr):
    """float32: rows x [BLOCK, D] times the Hadamard matrix times ``factor``."""
    zero = tl.zeros([BLOCK, D], tl.float32)
    return product(x, sign_matrix(D, x.dtype), zero, EMULATE) * factor


@triton.jit
def rounded_to(x, dtype: tl.constexpr):
    """float32 x rounded to ``dtype``, as float32. By its bits for bf16: the interpreter's cast rounds towards zero."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF).to(tl.float32, bitcast=True)
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def smooth_queries(
    p_q, i_head, i_block, heads, tokens, stride_b, stride_h, stride_s, factor,
    D: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """A block of q: rows rotated and without their mean, float32, and the mean before rotation [D]."""
    token = i_block * BLOCK + tl.arange(0, BLOCK)
    mask = token < tokens
    rows = load_rows(p_q, i_head, token, mask, heads, stride_b, stride_h, stride_s, D)
    count = tl.minimum(tokens - i_block * BLOCK, BLOCK).to(tl.float32)
    turned = rotated(rows, factor, D, EMULATE)
    turned = tl.where(mask[:, None], turned - (tl.sum(turned, axis=0) / count)[None, :], 0.0)
    return turned, tl.sum(rows.to(tl.float32), axis=0) / count


@triton.jit
def smooth_keys(
    p_k, p_permutation, p_mean, i_head, i_block, heads, tokens, stride_b, stride_h, stride_s, factor,
    D: tl.constexpr, PERMUTED: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """A block of k in KEY_ORDER, rotated and without the mean over tokens, float32."""
    key = key_at(i_block * BLOCK + tl.arange(0, BLOCK))
    mask = key < tokens
    token = gathered(p_permutation, i_head, key, mask, tokens, PERMUTED)
    rows = load_rows(p_k, i_head, token, mask, heads, stride_b, stride_h, stride_s, D)
    mean = tl.load(p_mean + i_head * D + tl.arange(0, D))
    return tl.where(mask[:, None], rotated(rows, factor, D, EMULATE) - mean[None, :], 0.0)


@triton.jit
def store_rows(x, scale, p_codes, p_scales, first_row, D: tl.constexpr, EMULATE: tl.constexpr):
    """NVFP4 of rows x [ROWS, D] under ``scale``: packed codes and group scales, to contiguous memory."""
    ROWS: tl.constexpr = x.shape[0]
    x = tl.reshape(tl.div_rn(x, scale), [ROWS, D // 16, 16])
    group_scales = round_ue4m3(tl.div_rn(tl.max(tl.abs(x), axis=2), tl.full([ROWS, D // 16], 6.0, tl.float32)))
    divisor = tl.broadcast_to(group_scales[:, :, None], [ROWS, D // 16, 16])
    # A group whose scale is zero is stored as zeros.
    x = tl.where(divisor > 0.0, tl.div_rn(x, tl.where(divisor > 0.0, divisor, 1.0)), 0.0)
    even, odd = tl.split(tl.reshape(x, [ROWS, D // 2, 2]))
    row = first_row + tl.arange(0, ROWS)
    tl.store(p_codes + row[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :], pack_e2m1(even, odd, EMULATE))
    tl.store(p_scales + row[:, None] * (D // 16) + tl.arange(0, D // 16)[None, :], bits_of_ue4m3(group_scales))


@triton.jit(do_not_specialize=["heads", "tokens", "blocks", "stride_b", "stride_h", "stride_s", "factor"])
def query_maxima_kernel(
    p_q,  # [B, heads, tokens, D]
    p_means: "*fp32",  # out [BH, blocks, D]: block means before rotation, times the sign in ``factor``
    p_maxima: "*fp32",  # out [BH, blocks]: largest magnitude after smoothing; infinity where q is not finite
    heads: tl.int32,
    tokens: tl.int32,
    blocks: tl.int32,
    stride_b: tl.int64,
    stride_h: tl.int64,
    stride_s: tl.int64,
    factor: tl.float32,  # D ** -0.5 with the sign of the softmax scale
    D: tl.constexpr,
    EMULATE: tl.constexpr,
):
    i_head, i_block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    turned, mean = smooth_queries(p_q, i_head, i_block, heads, tokens, stride_b, stride_h, stride_s, factor, D, EMULATE)
    place = i_head.to(tl.int64) * blocks + i_block
    sign = tl.where(factor > 0.0, 1.0, tl.where(factor < 0.0, -1.0, 0.0))
    tl.store(p_means + place * D + tl.arange(0, D), mean * sign)
    tl.store(p_maxima + place, tl.max(tl.max(finite_or_infinite(turned), axis=1), axis=0))


@triton.jit(do_not_specialize=["heads", "tokens", "blocks", "stride_b", "stride_h", "stride_s", "factor"])
def queries4_kernel(
    p_q,
    p_scale: "*fp32",  # [BH]
    p_codes: "*u8",  # out [BH, blocks * BLOCK, D / 2]
    p_scales: "*u8",  # out [BH, blocks * BLOCK, D / 16]
    heads: tl.int32,
    tokens: tl.int32,
    blocks: tl.int32,
    stride_b: tl.int64,
    stride_h: tl.int64,
    stride_s: tl.int64,
    factor: tl.float32,
    D: tl.constexpr,
    EMULATE: tl.constexpr,
):
    i_head, i_block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    turned, _ = smooth_queries(p_q, i_head, i_block, heads, tokens, stride_b, stride_h, stride_s, factor, D, EMULATE)
    first_row = (i_head.to(tl.int64) * blocks + i_block) * BLOCK
    store_rows(turned, tl.load(p_scale + i_head), p_codes, p_scales, first_row, D, EMULATE)


@triton.jit(do_not_specialize=["heads", "tokens", "blocks", "stride_b", "stride_h", "stride_s", "factor"])
def key_maxima_kernel(
    p_k,  # [B, heads, tokens, D]
    p_permutation: "*i32",  # [BH, tokens]
    p_mean: "*fp32",  # [BH, D]: rotated mean over tokens
    p_maxima: "*fp32",  # out [BH, blocks]
    heads: tl.int32,
    tokens: tl.int32,
    blocks: tl.int32,
    stride_b: tl.int64,
    stride_h: tl.int64,
    stride_s: tl.int64,
    factor: tl.float32,
    D: tl.constexpr,
    PERMUTED: tl.constexpr,
    EMULATE: tl.constexpr,
):
    i_head, i_block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    keys = smooth_keys(
        p_k, p_permutation, p_mean, i_head, i_block, heads, tokens, stride_b, stride_h, stride_s, factor,
        D, PERMUTED, EMULATE,
    )  # fmt: skip
    largest = tl.max(tl.max(finite_or_infinite(keys), axis=1), axis=0)
    tl.store(p_maxima + i_head.to(tl.int64) * blocks + i_block, largest)


@triton.jit(do_not_specialize=["heads", "tokens", "blocks", "stride_b", "stride_h", "stride_s", "factor"])
def keys4_kernel(
    p_k,
    p_permutation: "*i32",
    p_mean: "*fp32",
    p_scale: "*fp32",  # [BH]
    p_codes: "*u8",  # out [BH, blocks * BLOCK, D / 2], rows in KEY_ORDER
    p_scales: "*u8",  # out [BH, blocks * BLOCK, D / 16]
    heads: tl.int32,
    tokens: tl.int32,
    blocks: tl.int32,
    stride_b: tl.int64,
    stride_h: tl.int64,
    stride_s: tl.int64,
    factor: tl.float32,
    D: tl.constexpr,
    PERMUTED: tl.constexpr,
    EMULATE: tl.constexpr,
):
    i_head, i_block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    keys = smooth_keys(
        p_k, p_permutation, p_mean, i_head, i_block, heads, tokens, stride_b, stride_h, stride_s, factor,
        D, PERMUTED, EMULATE,
    )  # fmt: skip
    first_row = (i_head.to(tl.int64) * blocks + i_block) * BLOCK
    store_rows(keys, tl.load(p_scale + i_head), p_codes, p_scales, first_row, D, EMULATE)


@triton.jit
def load_values(
    p_v, p_permutation, i_head, i_block, heads, tokens, stride_b, stride_h, stride_s,
    D: tl.constexpr, PERMUTED: tl.constexpr,
):  # fmt: skip
    """A block of permuted v as float32 [BLOCK, D], and which of its rows are real."""
    token = i_block * BLOCK + tl.arange(0, BLOCK)
    mask = token < tokens
    source = gathered(p_permutation, i_head, token, mask, tokens, PERMUTED)
    return load_rows(p_v, i_head, source, mask, heads, stride_b, stride_h, stride_s, D).to(tl.float32), mask


@triton.jit(do_not_specialize=["heads", "tokens", "blocks", "stride_b", "stride_h", "stride_s"])
def value_maxima_kernel(
    p_v,  # [B, heads, tokens, D]
    p_permutation: "*i32",  # [BH, tokens]
    p_means: "*fp32",  # out [BH, blocks, D]: block means, rounded to v's dtype; not written without DEMEAN
    p_maxima: "*fp32",  # out [BH, blocks, D]: largest residual; infinity where v is not finite
    heads: tl.int32,
    tokens: tl.int32,
    blocks: tl.int32,
    stride_b: tl.int64,
    stride_h: tl.int64,
    stride_s: tl.int64,
    D: tl.constexpr,
    PERMUTED: tl.constexpr,
    DEMEAN: tl.constexpr,
):
    i_head, i_block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    values, mask = load_values(
        p_v, p_permutation, i_head, i_block, heads, tokens, stride_b, stride_h, stride_s, D, PERMUTED
    )
    o_mean = (i_head.to(tl.int64) * blocks + i_block) * D + tl.arange(0, D)
    if DEMEAN:
        count = tl.minimum(tokens - i_block * BLOCK, BLOCK).to(tl.float32)
        mean = tl.div_rn(tl.sum(values, axis=0), tl.broadcast_to(count, [D]))
        mean = rounded_to(mean, p_v.dtype.element_ty)
        tl.store(p_means + o_mean, mean)
        values = tl.where(mask[:, None], values - mean[None, :], 0.0)
    tl.store(p_maxima + o_mean, tl.max(finite_or_infinite(values), axis=0))


@triton.jit(do_not_specialize=["heads", "tokens", "blocks", "stride_b", "stride_h", "stride_s"])
def values4_kernel(
    p_v,
    p_permutation: "*i32",
    p_means: "*fp32",  # [BH, blocks, D]
    p_scale: "*fp32",  # [BH, D]
    p_unit_means: "*fp32",  # out [BH, blocks, D]: the means in units of the channel's scale
    p_codes: "*u8",  # out [BH, blocks, D, BLOCK / 2]
    p_scales: "*u8",  # out [BH, blocks, D, BLOCK / 16]
    heads: tl.int32,
    tokens: tl.int32,
    blocks: tl.int32,
    stride_b: tl.int64,
    stride_h: tl.int64,
    stride_s: tl.int64,
    D: tl.constexpr,
    PERMUTED: tl.constexpr,
    DEMEAN: tl.constexpr,
    EMULATE: tl.constexpr,
):
    i_head, i_block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    values, mask = load_values(
        p_v, p_permutation, i_head, i_block, heads, tokens, stride_b, stride_h, stride_s, D, PERMUTED
    )
    place = i_head.to(tl.int64) * blocks + i_block
    scale = tl.load(p_scale + i_head * D + tl.arange(0, D))
    if DEMEAN:
        o_mean = place * D + tl.arange(0, D)
        mean = tl.load(p_means + o_mean)
        values = tl.where(mask[:, None], values - mean[None, :], 0.0)
        tl.store(p_unit_means + o_mean, tl.div_rn(mean, scale))
    scale = tl.broadcast_to(scale[:, None], [D, BLOCK])
    store_rows(tl.trans(values), scale, p_codes, p_scales, place * D, BLOCK, EMULATE)


@triton.jit(
    do_not_specialize=[
        *("first_head", "first_block", "heads", "tokens", "q_blocks", "kv_blocks", "launch_blocks"),
        *("stride_b", "stride_h", "stride_s"),
    ]
)
def bias_kernel(
    p_high,  # [BH, q_blocks, D], of k's dtype: block means of q are high + low
    p_low,
    p_constant: "*fp32",  # [BH, q_blocks]: what every score of a block loses
    p_k,  # [B, heads, tokens, D]
    p_permutation: "*i32",  # [BH, tokens]
    p_unit: "*fp32",  # [BH]
    p_bias: "*fp32",  # out [heads of this launch, launch_blocks, kv_blocks * BLOCK], keys in KEY_ORDER
    first_head: tl.int32,
    first_block: tl.int32,
    heads: tl.int32,
    tokens: tl.int32,
    q_blocks: tl.int32,
    kv_blocks: tl.int32,
    launch_blocks: tl.int32,
    stride_b: tl.int64,
    stride_h: tl.int64,
    stride_s: tl.int64,
    D: tl.constexpr,
    PERMUTED: tl.constexpr,
    ROWS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """``bias = ((high + low) k^T - constant) unit``; minus infinity for padding keys.

    One program: 128 keys and all query blocks of this launch, ROWS at a time.
    """
    i_tile = tl.program_id(0) % kv_blocks
    i_launch = tl.program_id(0) // kv_blocks
    i_head = first_head + i_launch
    position = i_tile * BLOCK + tl.arange(0, BLOCK)
    key = key_at(position)
    mask = key < tokens
    token = gathered(p_permutation, i_head, key, mask, tokens, PERMUTED)
    keys = tl.trans(load_rows(p_k, i_head, token, mask, heads, stride_b, stride_h, stride_s, D))
    unit = tl.load(p_unit + i_head)
    p_column = p_bias + i_launch.to(tl.int64) * launch_blocks * (kv_blocks * BLOCK) + position
    for first_row in range(0, launch_blocks, ROWS):
        row = first_row + tl.arange(0, ROWS)
        real_row = row < launch_blocks
        o_mean = i_head.to(tl.int64) * q_blocks + first_block + row
        o_means = o_mean[:, None] * D + tl.arange(0, D)[None, :]
        bias = tl.zeros([ROWS, BLOCK], tl.float32) - tl.load(p_constant + o_mean, mask=real_row, other=0.0)[:, None]
        bias = product(tl.load(p_low + o_means, mask=real_row[:, None], other=0.0), keys, bias, EMULATE)
        bias = product(tl.load(p_high + o_means, mask=real_row[:, None], other=0.0), keys, bias, EMULATE)
        bias = tl.where(mask[None, :], bias * unit, -float("inf"))
        p_rows = p_column[None, :] + row.to(tl.int64)[:, None] * (kv_blocks * BLOCK)
        tl.store(p_rows, bias, mask=real_row[:, None])
