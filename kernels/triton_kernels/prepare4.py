"""Preparation for 4-bit attention: from 16-bit q, k, v of any strides to packed NVFP4 (quantize/triton4.py).

One program: one block of 128 tokens of one head. Two passes over each tensor, since one FP32 scale serves a whole head
(q, k) or channel (v): the first finds what the scale depends on, the second quantizes. Rows are rotated by a product
with the matrix of signs, exact in 16 bit, and scaled by ``D ** -0.5`` afterwards. How groups are rounded is said in
quantize/nvfp4.py.
"""

import triton
import triton.language as tl

from .nvfp4 import round_groups
from .rows import Rows, load_rows

BLOCK = tl.constexpr(128)
GROUP = tl.constexpr(16)


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
def product(a, b, c, EMULATE: tl.constexpr):
    """``c + a b`` in float32 for a and b of one dtype; emulated by TF32, which holds 16-bit numbers exactly."""
    if a.dtype == tl.float32:  # means, and the reference's operands
        return tl.dot(a, b, c, input_precision="tf32x3")
    elif EMULATE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="tf32")
    else:
        return tl.dot(a, b, c)


@triton.jit
def transformed(x, ROWS: tl.constexpr):
    """[ROWS, 16 G] from x [G * ROWS, 16], groups of channels in turn: the Hadamard transform of order G over them."""
    SIZE: tl.constexpr = x.shape[0]
    if SIZE == ROWS:
        return x
    else:
        first, second = tl.split(tl.permute(tl.reshape(x, [2, SIZE // 2, GROUP]), [1, 2, 0]))
        return joined(transformed(first + second, ROWS), transformed(first - second, ROWS))


@triton.jit
def rotated(x, factor, D: tl.constexpr, EMULATE: tl.constexpr):
    """float32: rows x [ROWS, D] times the Hadamard matrix times ``factor``; inside groups of 16 by a product."""
    ROWS: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = D // GROUP
    stacked = tl.reshape(tl.permute(tl.reshape(x, [ROWS, GROUPS, GROUP]), [1, 0, 2]), [GROUPS * ROWS, GROUP])
    zero = tl.zeros([GROUPS * ROWS, GROUP], tl.float32)
    return transformed(product(stacked, sign_matrix(GROUP, x.dtype), zero, EMULATE), ROWS) * factor


@triton.jit
def rounded_to(x, dtype: tl.constexpr):
    """float32 x rounded to ``dtype``, as float32. By its bits for bf16: the interpreter's cast rounds towards zero."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF).to(tl.float32, bitcast=True)
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def part_of_block(blocks, ROWS: tl.constexpr):
    """This program's head, block of the head, and part of ROWS rows of the block."""
    i_tile = tl.program_id(0) // (BLOCK // ROWS)
    return i_tile // blocks, i_tile % blocks, tl.program_id(0) % (BLOCK // ROWS)


@triton.jit
def load_queries(q, i_head, first, D: tl.constexpr, ROWS: tl.constexpr = BLOCK):
    """Rows of q from ``first`` on, [ROWS, D], and which of its rows are real."""
    token = first + tl.arange(0, ROWS)
    mask = token < q.tokens
    return load_rows(q, i_head, token, mask, D), mask


@triton.jit
def load_keys(k, p_permutation, i_head, first, D: tl.constexpr, PERMUTED: tl.constexpr, ROWS: tl.constexpr = BLOCK):
    """Rows of k from position ``first`` on, [ROWS, D] in KEY_ORDER, and which of its rows are real."""
    key = key_at(first + tl.arange(0, ROWS))
    mask = key < k.tokens
    token = gathered(p_permutation, i_head, key, mask, k.tokens, PERMUTED)
    return load_rows(k, i_head, token, mask, D), mask


@triton.jit
def halves(x):
    """Left and right half of the channels of x [ROWS, N]."""
    ROWS: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, [ROWS, 2, N // 2]), [0, 2, 1]))


@triton.jit
def joined(left, right):
    """[ROWS, 2 N]: what `halves` gives two parts of."""
    ROWS: tl.constexpr = left.shape[0]
    N: tl.constexpr = left.shape[1]
    return tl.reshape(tl.permute(tl.join(left, right), [0, 2, 1]), [ROWS, 2 * N])


@triton.jit
def store_groups(x, o_group, p_codes, p_scales, candidates, EMULATE: tl.constexpr):
    """Store NVFP4 of groups x [N, 16], at o_group [N] of the program's groups: packed codes and scales.

    Returns what is lost: float32 [N, 16], stored minus x.
    """
    bits, codes, lost = round_groups(x, candidates, EMULATE)
    tl.store(p_codes + o_group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :], codes)
    tl.store(p_scales + o_group, bits)
    return lost


@triton.jit
def store_channels(
    x, unit, p_mean, o_group, p_feedback, p_codes, p_scales, candidates,
    FIRST: tl.constexpr, D: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """NVFP4 of the channels x [ROWS, N] from FIRST on, each group's error fed into the groups behind it.

    The right half is moved by what the whole left half lost, then either half is treated likewise: the products of
    group by group in fewer and larger ones. A group loses its mean last, which keeps few means in registers.
    Returns half [ROWS, N]: x minus stored.
    """
    N: tl.constexpr = x.shape[1]
    if N == GROUP:
        mean = tl.load(p_mean + FIRST + tl.arange(0, GROUP))
        lost = store_groups(
            x - unit[:, None] * mean[None, :], o_group + FIRST // GROUP, p_codes, p_scales, candidates, EMULATE
        )
        return (-lost).to(tl.float16)
    else:
        left, right = halves(x)
        left = store_channels(left, unit, p_mean, o_group, p_feedback, p_codes, p_scales, candidates, FIRST, D, EMULATE)
        o_from = tl.arange(0, N // 2) + FIRST
        o_to = o_from + N // 2
        right = tl.dot(left, tl.load(p_feedback + o_from[:, None] * D + o_to[None, :]), right)
        right = store_channels(
            right, unit, p_mean, o_group, p_feedback, p_codes, p_scales, candidates, FIRST + N // 2, D, EMULATE
        )
        return joined(left, right)


@triton.jit
def store_rows(
    x, unit, p_mean, p_feedback, p_codes, p_scales, candidates, first_row, D: tl.constexpr, EMULATE: tl.constexpr
):
    """NVFP4 of rows x [ROWS, D] minus ``unit`` [ROWS] times a mean, with feedback.

    ``p_mean`` points to the mean [D], ``p_feedback`` to the weights [D, D] of the head.
    """
    p_codes += first_row * (D // 2)
    p_scales += first_row * (D // GROUP)
    o_group = tl.arange(0, x.shape[0]) * (D // GROUP)
    store_channels(x, unit, p_mean, o_group, p_feedback, p_codes, p_scales, candidates, 0, D, EMULATE)


@triton.jit(do_not_specialize=["heads", "tokens", "blocks", "stride_b", "stride_h", "stride_s", "factor"])
def query_maxima_kernel(
    p_q,  # [B, heads, tokens, D]
    p_means: "*fp32",  # out [BH, blocks, D]: block means before rotation, times the sign in ``factor``
    p_turned_means: "*fp32",  # out [BH, blocks, D]: after it, times ``factor``
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
    q = Rows(p_q, heads, tokens, stride_b, stride_h, stride_s)
    rows, mask = load_queries(q, i_head, i_block * BLOCK, D)
    place = i_head.to(tl.int64) * blocks + i_block
    o_mean = place * D + tl.arange(0, D)
    count = tl.minimum(tokens - i_block * BLOCK, BLOCK).to(tl.float32)
    sign = tl.where(factor > 0.0, 1.0, tl.where(factor < 0.0, -1.0, 0.0))
    tl.store(p_means + o_mean, tl.sum(rows.to(tl.float32), axis=0) / count * sign)
    turned = rotated(rows, factor, D, EMULATE)
    mean = tl.sum(turned, axis=0) / count
    tl.store(p_turned_means + o_mean, mean)
    turned = tl.where(mask[:, None], turned - mean[None, :], 0.0)
    tl.store(p_maxima + place, tl.max(tl.max(finite_or_infinite(turned), axis=1), axis=0))


@triton.jit(do_not_specialize=["candidates", "heads", "tokens", "blocks", "stride_b", "stride_h", "stride_s", "factor"])
def queries4_kernel(
    p_q,
    p_mean: "*fp32",  # [BH, blocks, D]: rotated block means
    p_scale: "*fp32",  # [BH]
    p_feedback: "*fp16",  # [BH, D, D]
    p_codes: "*u8",  # out [BH, blocks * BLOCK, D / 2]
    p_scales: "*u8",  # out [BH, blocks * BLOCK, D / 16]
    candidates: tl.int32,  # scales tried for each group, of STEPS
    heads: tl.int32,
    tokens: tl.int32,
    blocks: tl.int32,
    stride_b: tl.int64,
    stride_h: tl.int64,
    stride_s: tl.int64,
    factor: tl.float32,
    D: tl.constexpr,
    EMULATE: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
):
    i_head, i_block, i_part = part_of_block(blocks, ROWS)
    first = i_block * BLOCK + i_part * ROWS
    unit = 1.0 / tl.load(p_scale + i_head)
    q = Rows(p_q, heads, tokens, stride_b, stride_h, stride_s)
    rows, mask = load_queries(q, i_head, first, D, ROWS)
    unit_of_row = tl.where(mask, unit, 0.0)
    block = i_head.to(tl.int64) * blocks + i_block
    store_rows(
        rotated(rows, factor * unit, D, EMULATE), unit_of_row, p_mean + block * D,
        p_feedback + i_head.to(tl.int64) * (D * D), p_codes, p_scales, candidates, block * BLOCK + i_part * ROWS,
        D, EMULATE,
    )  # fmt: skip


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
    k = Rows(p_k, heads, tokens, stride_b, stride_h, stride_s)
    rows, mask = load_keys(k, p_permutation, i_head, i_block * BLOCK, D, PERMUTED)
    mean = tl.load(p_mean + i_head * D + tl.arange(0, D))
    keys = tl.where(mask[:, None], rotated(rows, factor, D, EMULATE) - mean[None, :], 0.0)
    largest = tl.max(tl.max(finite_or_infinite(keys), axis=1), axis=0)
    tl.store(p_maxima + i_head.to(tl.int64) * blocks + i_block, largest)


@triton.jit(do_not_specialize=["candidates", "heads", "tokens", "blocks", "stride_b", "stride_h", "stride_s", "factor"])
def keys4_kernel(
    p_k,
    p_permutation: "*i32",
    p_mean: "*fp32",
    p_scale: "*fp32",  # [BH]
    p_feedback: "*fp16",  # [BH, D, D]
    p_codes: "*u8",  # out [BH, blocks * BLOCK, D / 2], rows in KEY_ORDER
    p_scales: "*u8",  # out [BH, blocks * BLOCK, D / 16]
    candidates: tl.int32,
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
    ROWS: tl.constexpr,  # of a program
):
    i_head, i_block, i_part = part_of_block(blocks, ROWS)
    first = i_block * BLOCK + i_part * ROWS
    unit = 1.0 / tl.load(p_scale + i_head)
    k = Rows(p_k, heads, tokens, stride_b, stride_h, stride_s)
    rows, mask = load_keys(k, p_permutation, i_head, first, D, PERMUTED, ROWS)
    unit_of_row = tl.where(mask, unit, 0.0)
    first_row = (i_head.to(tl.int64) * blocks + i_block) * BLOCK + i_part * ROWS
    store_rows(
        rotated(rows, factor * unit, D, EMULATE), unit_of_row, p_mean + i_head * D,
        p_feedback + i_head.to(tl.int64) * (D * D), p_codes, p_scales, candidates, first_row, D, EMULATE,
    )  # fmt: skip


@triton.jit
def load_values(v, p_permutation, i_head, token, D: tl.constexpr, PERMUTED: tl.constexpr):
    """Permuted v at positions token [ROWS] as float32 [ROWS, D], and which of its rows are real."""
    mask = token < v.tokens
    source = gathered(p_permutation, i_head, token, mask, v.tokens, PERMUTED)
    return load_rows(v, i_head, source, mask, D).to(tl.float32), mask


@triton.jit
def load_groups(v, p_permutation, i_head, token, D: tl.constexpr, PERMUTED: tl.constexpr, STEP: tl.constexpr = 1):
    """float32 [N, D, 16 / STEP]: permuted v at the tokens ``token`` [N], then ``token + STEP``, and so on to 16.

    Joined tensors lie in one thread: no group is ever spread over threads.
    """
    if STEP == GROUP:
        values, _ = load_values(v, p_permutation, i_head, token, D, PERMUTED)
        return values
    else:
        even = load_groups(v, p_permutation, i_head, token, D, PERMUTED, 2 * STEP)
        odd = load_groups(v, p_permutation, i_head, token + STEP, D, PERMUTED, 2 * STEP)
        N: tl.constexpr = token.shape[0]
        return tl.reshape(tl.join(even, odd), [N, D, GROUP // STEP])


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
    token = i_block * BLOCK + tl.arange(0, BLOCK)
    v = Rows(p_v, heads, tokens, stride_b, stride_h, stride_s)
    values, mask = load_values(v, p_permutation, i_head, token, D, PERMUTED)
    o_mean = (i_head.to(tl.int64) * blocks + i_block) * D + tl.arange(0, D)
    if DEMEAN:
        count = tl.minimum(tokens - i_block * BLOCK, BLOCK).to(tl.float32)
        mean = tl.div_rn(tl.sum(values, axis=0), tl.broadcast_to(count, [D]))
        mean = rounded_to(mean, p_v.dtype.element_ty)
        tl.store(p_means + o_mean, mean)
        values = tl.where(mask[:, None], values - mean[None, :], 0.0)
    tl.store(p_maxima + o_mean, tl.max(finite_or_infinite(values), axis=0))


@triton.jit(do_not_specialize=["candidates", "heads", "tokens", "blocks", "stride_b", "stride_h", "stride_s"])
def values4_kernel(
    p_v,
    p_permutation: "*i32",
    p_means: "*fp32",  # [BH, blocks, D]
    p_scale: "*fp32",  # [BH, D]
    p_unit_means: "*fp32",  # out [BH, blocks, D]: means and what rounding took from them, in units of scale
    p_codes: "*u8",  # out [BH, blocks, D, BLOCK / 2]
    p_scales: "*u8",  # out [BH, blocks, D, BLOCK / 16]
    candidates: tl.int32,
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
    GROUPS: tl.constexpr = BLOCK // GROUP
    i_head, i_block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    place = i_head.to(tl.int64) * blocks + i_block
    o_channel = tl.arange(0, D)
    inverse = 1.0 / tl.load(p_scale + i_head * D + o_channel)
    first_token = i_block * BLOCK + tl.arange(0, GROUPS) * GROUP
    v = Rows(p_v, heads, tokens, stride_b, stride_h, stride_s)
    groups = load_groups(v, p_permutation, i_head, first_token, D, PERMUTED)
    mean = tl.zeros([D], tl.float32)
    if DEMEAN:
        mean = tl.load(p_means + place * D + o_channel)
        real = first_token[:, None] + tl.arange(0, GROUP)[None, :] < tokens
        groups = tl.where(real[:, None, :], groups - mean[None, :, None], 0.0)
    groups = tl.reshape(groups * inverse[None, :, None], [GROUPS * D, GROUP])
    o_group = tl.reshape(o_channel[None, :] * GROUPS + tl.arange(0, GROUPS)[:, None], [GROUPS * D])
    p_codes += place * (D * BLOCK // 2)
    p_scales += place * (D * GROUPS)
    lost = store_groups(groups, o_group, p_codes, p_scales, candidates, EMULATE)
    if DEMEAN:
        count = tl.minimum(tokens - i_block * BLOCK, BLOCK).to(tl.float32)
        taken = tl.sum(tl.reshape(tl.sum(lost, axis=1), [GROUPS, D]), axis=0)
        tl.store(p_unit_means + place * D + o_channel, mean * inverse - taken / count)


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
    OWN: tl.constexpr,
    ROWS: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """``bias = ((high + low) k^T - constant) unit``; minus infinity for padding keys and, if OWN, for the own block's.

    One program: 128 keys and all query blocks of this launch, ROWS at a time.
    """
    i_tile = tl.program_id(0) % kv_blocks
    i_launch = tl.program_id(0) // kv_blocks
    i_head = first_head + i_launch
    position = i_tile * BLOCK + tl.arange(0, BLOCK)
    key = key_at(position)
    mask = key < tokens
    token = gathered(p_permutation, i_head, key, mask, tokens, PERMUTED)
    k = Rows(p_k, heads, tokens, stride_b, stride_h, stride_s)
    keys = tl.trans(load_rows(k, i_head, token, mask, D))
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
        left_out = ~mask[None, :]
        if OWN:
            left_out |= (token // BLOCK)[None, :] == (first_block + row)[:, None]
        bias = tl.where(left_out, -float("inf"), bias * unit)
        p_rows = p_column[None, :] + row.to(tl.int64)[:, None] * (kv_blocks * BLOCK)
        tl.store(p_rows, bias, mask=real_row[:, None])
