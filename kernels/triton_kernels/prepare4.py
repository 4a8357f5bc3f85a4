"""Preparation for 4-bit attention: from 16-bit q, k, v of any strides to packed NVFP4 (quantize/triton4.py).

One program: one block of 128 tokens of one head. Two passes over each tensor, since one FP32 scale serves a whole head
(q, k) or channel (v): the first finds what the scale depends on, the second quantizes. Rows are rotated by a product
with the matrix of signs, exact in 16 bit, and scaled by ``D ** -0.5`` afterwards. How groups are rounded is said in
quantize/nvfp4.py.
"""

import triton
import triton.language as tl

from .nvfp4 import bits_of_ue4m3, decode_ue4m3, pack_e2m1, round_e2m1, round_ue4m3

BLOCK = tl.constexpr(128)
GROUP = tl.constexpr(16)
TOP_CODE = tl.constexpr(126)  # UE4M3 bits of 448
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
def inverse_of(scale):
    """``1 / scale``; zero for zero, so that a group whose scale is zero is stored as zeros."""
    safe = tl.where(scale > 0.0, scale, 1.0)
    one = tl.full([scale.shape[0], scale.shape[1]], 1.0, tl.float32)
    return tl.where(scale > 0.0, tl.div_rn(one, safe), 0.0)


@triton.jit
def squared_error(x, scale):
    """[ROWS, GROUPS]: what rounding x [ROWS, GROUPS, 16] costs under scales [ROWS, GROUPS]."""
    rounded = round_e2m1(x * inverse_of(scale)[:, :, None]) * scale[:, :, None]
    error = rounded - tl.abs(x)
    return tl.sum(error * error, axis=2)


@triton.jit
def closer_scales(x, at_6, best, least, STEP: tl.constexpr):
    """``best`` and its squared error, or the code STEP from ``at_6`` and its error where that is smaller."""
    code = tl.minimum(tl.maximum(at_6 + STEP, 0), TOP_CODE)
    error = squared_error(x, decode_ue4m3(code))
    return tl.where(error < least, code, best), tl.minimum(error, least)


@triton.jit
def closest_scales(x):
    """UE4M3 bits, int32 [ROWS, GROUPS], that round x [ROWS, GROUPS, 16] with the least squared error."""
    largest = tl.max(tl.abs(x), axis=2)
    six = tl.full([x.shape[0], x.shape[1]], 6.0, tl.float32)
    at_6 = bits_of_ue4m3(round_ue4m3(tl.div_rn(largest, six))).to(tl.int32)
    best, least = at_6, squared_error(x, decode_ue4m3(at_6))
    best, least = closer_scales(x, at_6, best, least, -1)
    best, least = closer_scales(x, at_6, best, least, 1)
    best, least = closer_scales(x, at_6, best, least, 4)
    best, least = closer_scales(x, at_6, best, least, 5)
    return best


@triton.jit
def store_groups(x, row, first_group, p_codes, p_scales, SIZE: tl.constexpr, EMULATE: tl.constexpr):
    """Store NVFP4 of x [ROWS, GROUPS, 16] as groups of rows of SIZE numbers: packed codes and scales.

    Returns what is lost: float32 [ROWS, GROUPS, 16], stored minus x.
    """
    ROWS: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = x.shape[1]
    bits = closest_scales(x)
    scale = decode_ue4m3(bits)
    positive = tl.broadcast_to((scale > 0.0)[:, :, None], [ROWS, GROUPS, GROUP])
    ratio = tl.where(positive, x * inverse_of(scale)[:, :, None], 0.0)  # no zeros with the sign of what is lost
    even, odd = tl.split(tl.reshape(ratio, [ROWS, GROUPS * 8, 2]))
    p_row = p_codes + row[:, None] * (SIZE // 2) + first_group * (GROUP // 2)
    tl.store(p_row + tl.arange(0, GROUPS * 8)[None, :], pack_e2m1(even, odd, EMULATE))
    p_row = p_scales + row[:, None] * (SIZE // GROUP) + first_group
    tl.store(p_row + tl.arange(0, GROUPS)[None, :], bits.to(tl.uint8))
    rounded = round_e2m1(ratio) * scale[:, :, None]
    return tl.where(x < 0.0, -rounded, rounded) - x


@triton.jit
def store_rows(x, scale, p_feedback, p_codes, p_scales, first_row, D: tl.constexpr, EMULATE: tl.constexpr):
    """NVFP4 of rows x [BLOCK, D] under ``scale``, each group's error fed into the groups behind it.

    ``p_feedback`` points to the head's weights [D, D].
    """
    x = tl.div_rn(x, scale)
    row = first_row + tl.arange(0, BLOCK)
    for i_group in range(D // GROUP):
        chosen = (tl.arange(0, D // GROUP) == i_group)[None, :, None]
        group = tl.sum(tl.where(chosen, tl.reshape(x, [BLOCK, D // GROUP, GROUP]), 0.0), axis=1)
        lost = store_groups(group[:, None, :], row, i_group, p_codes, p_scales, D, EMULATE)
        o_from = tl.arange(0, GROUP) + i_group * GROUP
        weights = tl.load(p_feedback + o_from[:, None] * D + tl.arange(0, D)[None, :])
        x = product(tl.reshape(-lost, [BLOCK, GROUP]), weights, x, EMULATE)


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
    p_feedback: "*fp32",  # [BH, D, D]
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
    p_head_feedback = p_feedback + i_head.to(tl.int64) * (D * D)
    store_rows(turned, tl.load(p_scale + i_head), p_head_feedback, p_codes, p_scales, first_row, D, EMULATE)


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
    p_feedback: "*fp32",  # [BH, D, D]
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
    p_head_feedback = p_feedback + i_head.to(tl.int64) * (D * D)
    store_rows(keys, tl.load(p_scale + i_head), p_head_feedback, p_codes, p_scales, first_row, D, EMULATE)


@triton.jit
def load_values(
    p_v, p_permutation, i_head, first_token, heads, tokens, stride_b, stride_h, stride_s,
    ROWS: tl.constexpr, D: tl.constexpr, PERMUTED: tl.constexpr,
):  # fmt: skip
    """Permuted v from a token on as float32 [ROWS, D], and which of its rows are real."""
    token = first_token + tl.arange(0, ROWS)
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
        p_v, p_permutation, i_head, i_block * BLOCK, heads, tokens, stride_b, stride_h, stride_s, BLOCK, D, PERMUTED
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
    p_unit_means: "*fp32",  # out [BH, blocks, D]: means and what rounding took from them, in units of scale
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
    place = i_head.to(tl.int64) * blocks + i_block
    o_channel = tl.arange(0, D)
    scale = tl.load(p_scale + i_head * D + o_channel)
    mean = tl.zeros([D], tl.float32)
    if DEMEAN:
        mean = tl.load(p_means + place * D + o_channel)
    lost = tl.zeros([D], tl.float32)
    for i_group in range(BLOCK // GROUP):
        first_token = i_block * BLOCK + i_group * GROUP
        values, mask = load_values(
            p_v, p_permutation, i_head, first_token, heads, tokens, stride_b, stride_h, stride_s, GROUP, D, PERMUTED
        )
        values = tl.where(mask[:, None], values - mean[None, :], 0.0)
        group = tl.trans(tl.div_rn(values, tl.broadcast_to(scale[None, :], [GROUP, D])))
        stored = store_groups(group[:, None, :], place * D + o_channel, i_group, p_codes, p_scales, BLOCK, EMULATE)
        lost += tl.sum(tl.reshape(stored, [D, GROUP]), axis=1)
    if DEMEAN:
        count = tl.minimum(tokens - i_block * BLOCK, BLOCK).to(tl.float32)
        tl.store(p_unit_means + place * D + o_channel, tl.div_rn(mean, scale) - lost / count)


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
