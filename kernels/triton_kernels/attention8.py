"""8-bit attention, tile by tile as attend/reference.py: one program makes BLOCK_Q rows of one head.

Scores are held in codes, 1/8 octave each. The row sums that divide the output and restore the block means are those
of the probabilities as the tensor cores get them.

Probabilities reach the second product without leaving their thread: inside each group of 32 keys, V is stored in the
order in which a thread holds its scores (``KEY_ORDER`` of the host side), and ``in_key_order`` only renames registers.
"""

import triton
import triton.language as tl

from .common import WORD, encode_e4m3, in_key_order, round_to

BLOCK: tl.constexpr = tl.constexpr(128)
MEAN_ROWS: tl.constexpr = tl.constexpr(16)  # three are used; a product of bf16 has at least 16
CODE_OF_TOP: tl.constexpr = tl.constexpr(119.65)  # 8 * 8 + 56 - 0.35: code of the maximum before rounding
# Codes per unit of q.k, at most: a score stays below 2^22, where float32 holds quarters and no rounding lifts a code
# above its row's maximum. Two codes a unit is a rounding noise of some hundred codes: a score that wants more is noise.
LEAST: tl.constexpr = tl.constexpr(1e-30)  # a product with minus infinity must not be NaN
MOST_PER_INT8: tl.constexpr = tl.constexpr(2.0)
MOST_PER_E4M3: tl.constexpr = tl.constexpr(0.15)
ROUNDER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to a whole number, held in the low bits
INTEGER_ROUNDER: tl.constexpr = tl.constexpr(0x4B400000)  # its bits: integers below 2^22 become float by one addition


@triton.jit
def _scores(b_q, b_k, INT8: tl.constexpr):
    """Products of codes, exact in float32."""
    if INT8:
        product = tl.dot(b_q, tl.trans(b_k), out_dtype=tl.int32)
        return (product + INTEGER_ROUNDER).to(tl.float32, bitcast=True) - ROUNDER
    return tl.dot(b_q.to(tl.float8e4nv, bitcast=True), tl.trans(b_k.to(tl.float8e4nv, bitcast=True)))


@triton.jit
def _probabilities(x, b_scale, b_maximum, EXPCAST: tl.constexpr, EMULATE: tl.constexpr):
    """E4M3 bits of a tile's probabilities, as int32 of which the low 12 bits count."""
    if EXPCAST:
        code = x * b_scale[:, None] + (-b_maximum + CODE_OF_TOP)[:, None]
        return (tl.maximum(code, 0.0) + ROUNDER).to(tl.int32, bitcast=True)
    exponent = x * (b_scale * 0.125)[:, None] + (8.0 - b_maximum * 0.125)[:, None]
    return encode_e4m3(tl.exp2(exponent), EMULATE).to(tl.int32)


@triton.jit
def _add_means(product, b_row, p_means, D: tl.constexpr, EMULATE: tl.constexpr):
    """``product + b_row mean`` for row sums [BLOCK_Q] and the tile's mean [D], by the tensor cores.

    Both factors are two bf16 numbers, high and low: weights (high, high, low) meet rows (high, low, high) of the
    stored mean. It leaves 2^-16 of the mean out, takes 16 instructions instead of 80, and 32 registers less.
    """
    o_row, o_d = tl.arange(0, MEAN_ROWS), tl.arange(0, D)
    b_high = round_to(b_row, tl.bfloat16, EMULATE).to(tl.float32)
    b_low = tl.where((o_row == 2)[None, :], (b_row - b_high)[:, None], 0.0)
    b_weight = tl.where((o_row < 2)[None, :], b_high[:, None], b_low)
    b_mean = tl.load(p_means + o_row[:, None] * D + o_d[None, :])
    if EMULATE:  # the interpreter multiplies the bits of bf16 as integers
        return tl.dot(b_weight, b_mean.to(tl.float32), acc=product)
    return tl.dot(b_weight.to(tl.bfloat16), b_mean, acc=product)


@triton.jit
def _tile(
    b_q, b_qscale, p_k, p_kscale, p_v, p_means, i_tile, b_maximum, b_sum, b_out, S_kv,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, INT8: tl.constexpr, EXPCAST: tl.constexpr, MEANS: tl.constexpr,
    EMULATE: tl.constexpr, SUM_BY_DOT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take key tile ``i_tile`` into running maximum [BLOCK_Q], row sum [BLOCK_Q] and output [BLOCK_Q, D]."""
    o_key, o_d = tl.arange(0, BLOCK), tl.arange(0, D)
    b_k = tl.load(p_k + i_tile * (BLOCK * D) + o_key[:, None] * D + o_d[None, :])  # [BLOCK, D]
    b_v = tl.load(p_v + i_tile * (BLOCK * D) + o_d[:, None] * BLOCK + o_key[None, :])  # [D, BLOCK]
    most = MOST_PER_INT8 if INT8 else MOST_PER_E4M3
    b_scale = tl.minimum(tl.maximum(b_qscale * tl.load(p_kscale + i_tile), LEAST), most)
    x = _scores(b_q, b_k, INT8)
    if MASKED:  # the scale is positive: the probability becomes exactly 0
        x = tl.where((i_tile * BLOCK + o_key < S_kv)[None, :], x, -float("inf"))
    b_tile_maximum = tl.max(x, 1) * b_scale
    if EXPCAST:
        b_tile_maximum = tl.ceil(b_tile_maximum)
    b_new = tl.maximum(b_maximum, b_tile_maximum)
    b_alpha = tl.exp2((b_maximum - b_new) * 0.125)
    b_bits = _probabilities(x, b_scale, b_new, EXPCAST, EMULATE)
    b_p = in_key_order(b_bits.to(tl.uint8), BLOCK_Q, BLOCK).to(tl.float8e4nv, bitcast=True)
    product = tl.dot(b_p, tl.trans(b_v).to(tl.float8e4nv, bitcast=True))
    if SUM_BY_DOT:
        b_row = tl.max(tl.dot(b_p, tl.full((BLOCK, 8), 1.0, tl.float32).to(tl.float8e4nv)), 1)
    else:
        # A code in the exponent's place is the number divided by 2^120, subnormals included.
        b_row = tl.sum((b_bits << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36, 1)
    if MEANS:
        product = _add_means(product, b_row, p_means + i_tile * (MEAN_ROWS * D), D, EMULATE)
    # A fused multiply-add keeps the compiler from accumulating inside the tensor cores, whose sums have 14 bits.
    b_out = tl.fma(b_out, tl.broadcast_to(b_alpha[:, None], b_out.shape), product)
    return b_new, b_sum * b_alpha + b_row, b_out


@triton.jit(do_not_specialize=["H", "S_q", "S_kv", "out_b", "out_h", "out_s"])
def attention8_fwd_kernel(
    q: "*u8",  # [BH, NQ, BLOCK, D] int8 or E4M3 bits
    q_scale: "*fp32",  # [BH, NQ] codes per unit of q.k, without k's scale; not negative
    k: "*u8",  # [BH, NB, BLOCK, D]
    k_scale: "*fp32",  # [BH, NB]
    v: "*u8",  # [BH, NB, D, BLOCK] E4M3 bits, keys in KEY_ORDER
    v_scale: "*fp32",  # [BH, D]
    means: "*bf16",  # [BH, NB, MEAN_ROWS, D] in units of v_scale: high part, low part, high part, zeros
    out,  # [B, H, S_q, D] bf16 or fp16, strides in words
    H: tl.int32, S_q: tl.int32, S_kv: tl.int32, out_b: tl.int64, out_h: tl.int64, out_s: tl.int64,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, INT8: tl.constexpr, EXPCAST: tl.constexpr, MEANS: tl.constexpr,
    EMULATE: tl.constexpr, SUM_BY_DOT: tl.constexpr,
):  # fmt: skip
    tl.static_assert(BLOCK % BLOCK_Q == 0)
    n_blocks, n_q_blocks = tl.cdiv(S_kv, BLOCK), tl.cdiv(S_q, BLOCK)
    n_rows = tl.cdiv(S_q, BLOCK_Q)
    i_head, i_q = (tl.program_id(0) // n_rows).to(tl.int64), tl.program_id(0) % n_rows
    o_q, o_d = i_q * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, D)
    if INT8:
        q, k = q.to(tl.pointer_type(tl.int8), bitcast=True), k.to(tl.pointer_type(tl.int8), bitcast=True)
    b_q = tl.load(q + i_head * n_q_blocks * (BLOCK * D) + o_q[:, None] * D + o_d[None, :])
    b_qscale = tl.zeros([BLOCK_Q], tl.float32) + tl.load(q_scale + i_head * n_q_blocks + i_q * BLOCK_Q // BLOCK)
    p_k, p_v = k + i_head * n_blocks * (BLOCK * D), v + i_head * n_blocks * (BLOCK * D)
    p_kscale, p_means = k_scale + i_head * n_blocks, means + i_head * n_blocks * (MEAN_ROWS * D)
    b_maximum = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_Q], tl.float32)
    b_out = tl.zeros([BLOCK_Q, D], tl.float32)
    n_full = S_kv // BLOCK
    for i_tile in range(0, n_full):
        b_maximum, b_sum, b_out = _tile(
            b_q, b_qscale, p_k, p_kscale, p_v, p_means, i_tile, b_maximum, b_sum, b_out, S_kv,
            D, BLOCK_Q, INT8, EXPCAST, MEANS, EMULATE, SUM_BY_DOT, False,
        )  # fmt: skip
    if n_full < n_blocks:
        b_maximum, b_sum, b_out = _tile(
            b_q, b_qscale, p_k, p_kscale, p_v, p_means, n_full, b_maximum, b_sum, b_out, S_kv,
            D, BLOCK_Q, INT8, EXPCAST, MEANS, EMULATE, SUM_BY_DOT, True,
        )  # fmt: skip
    b_out = b_out / b_sum[:, None] * tl.load(v_scale + i_head * D + o_d)[None, :]
    p_out = out + (i_head // H * out_b + i_head % H * out_h) * WORD + (o_q.to(tl.int64) * out_s * WORD)[:, None]
    p_out += o_d[None, :]
    tl.store(p_out, round_to(b_out, out.dtype.element_ty, EMULATE), mask=(o_q < S_q)[:, None])
