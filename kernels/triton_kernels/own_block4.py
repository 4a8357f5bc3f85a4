"""Attention in 16 bit to the 128 keys of a query's own block, in the order of the sequence (attend/own_block.py).

One program: half of the rows of a block of one head, and all keys of the block. Its output and ``p_seen`` are where the
recurrence of ``attention4_fwd_kernel`` starts.
"""

import triton
import triton.language as tl

from .common import round_to
from .nvfp4 import decode_e2m1, decode_ue4m3, exp2, log2
from .prepare4 import BLOCK, part_of_block, product, rotated
from .rows import Rows, load_columns, load_rows, rows_at

CHANNELS = tl.constexpr(64)


@triton.jit
def own_key_scores(p_codes, p_scales, q_scale, p_q_mean, keys, key_mean, D: tl.constexpr, EMULATE: tl.constexpr):
    """[ROWS]: queries as the 4-bit scores see them times their own ``keys`` [ROWS, D] without the mean of k.

    Args:
        p_codes, p_scales: the first row's.
        p_q_mean: [D], the block's; rotated, as is ``key_mean`` [D].
    """
    ROWS: tl.constexpr = keys.shape[0]
    o_row = tl.arange(0, ROWS)[:, None]
    o_byte = tl.arange(0, D // 2)
    turned = rotated(keys, D**-0.5, D, EMULATE) - key_mean[None, :]
    even, odd = tl.split(tl.reshape(turned, [ROWS, D // 2, 2]))
    packed = tl.load(p_codes + o_row * (D // 2) + o_byte[None, :]).to(tl.int32)
    scales = decode_ue4m3(tl.load(p_scales + o_row * (D // 16) + tl.arange(0, D // 16)[None, :]))
    rounded = tl.reshape(even * decode_e2m1(packed & 15) + odd * decode_e2m1(packed >> 4), [ROWS, D // 16, 8])
    mean = even * tl.load(p_q_mean + 2 * o_byte)[None, :] + odd * tl.load(p_q_mean + 2 * o_byte + 1)[None, :]
    return tl.sum(tl.sum(rounded, axis=2) * scales, axis=1) * q_scale + tl.sum(mean, axis=1)


@triton.jit(
    do_not_specialize=[
        *("heads", "tokens", "blocks", "sign"),
        *("q_b", "q_h", "q_s", "k_b", "k_h", "k_s", "v_b", "v_h", "v_s", "out_b", "out_h", "out_s"),
    ]
)
def own_block4_fwd_kernel(
    p_q,  # [B, heads, tokens, D]
    p_k,
    p_v,
    p_codes: "*u8",  # q in E2M1 [BH, blocks * BLOCK, D / 2], rotated, without block means
    p_scales: "*u8",  # [BH, blocks * BLOCK, D / 16]
    p_q_scale: "*fp32",  # [BH]
    p_q_means: "*fp32",  # [BH, blocks, D]: block means of q times ``sign``, rotated
    p_key_mean: "*fp32",  # [BH, D], rotated
    p_octaves: "*fp32",  # [BH], per unit of q k^T
    p_score_scale: "*fp32",  # [BH], octaves per unit of the 4-bit scores
    p_seen: "*fp32",  # out [BH, blocks * BLOCK]: log2 of the sum of exponentials, in units of the 4-bit scores
    p_out,  # out [B, heads, tokens, D], last dimension contiguous
    heads: tl.int32,
    tokens: tl.int32,
    blocks: tl.int32,
    sign: tl.float32,  # of the softmax scale
    q_b: tl.int64,  # strides in words of 8 elements
    q_h: tl.int64,
    q_s: tl.int64,
    k_b: tl.int64,
    k_h: tl.int64,
    k_s: tl.int64,
    v_b: tl.int64,
    v_h: tl.int64,
    v_s: tl.int64,
    out_b: tl.int64,
    out_h: tl.int64,
    out_s: tl.int64,
    D: tl.constexpr,
    EMULATE: tl.constexpr,
    ROWS: tl.constexpr,
):
    tl.static_assert(2 * ROWS == BLOCK)
    i_head, i_block, i_part = part_of_block(blocks, ROWS)
    q = Rows(p_q, heads, tokens, q_b, q_h, q_s)
    k = Rows(p_k, heads, tokens, k_b, k_h, k_s)
    v = Rows(p_v, heads, tokens, v_b, v_h, v_s)
    out = Rows(p_out, heads, tokens, out_b, out_h, out_s)
    o_row = tl.arange(0, ROWS)
    o_channel = tl.arange(0, D)
    first = i_block * BLOCK
    row = first + i_part * ROWS + o_row
    other = first + (i_part ^ 1) * ROWS + o_row
    m_row, m_other = row < tokens, other < tokens
    place = i_head.to(tl.int64) * blocks + i_block
    packed_row = place * BLOCK + i_part * ROWS

    b_k = load_rows(k, i_head, row, m_row, D)
    b_own = own_key_scores(
        p_codes + packed_row * (D // 2), p_scales + packed_row * (D // 16), tl.load(p_q_scale + i_head),
        p_q_means + place * D, b_k, tl.load(p_key_mean + i_head * D + o_channel), D, EMULATE,
    )  # fmt: skip

    octaves = tl.load(p_octaves + i_head)
    b_q = load_rows(q, i_head, row, m_row, D)
    b_k = load_columns(k, i_head, row, m_row, D)
    b_near = product(b_q, b_k, tl.zeros([ROWS, ROWS], tl.float32), EMULATE)
    b_k = load_columns(k, i_head, other, m_other, D)
    b_far = product(b_q, b_k, tl.zeros([ROWS, ROWS], tl.float32), EMULATE)
    b_diagonal = tl.sum(tl.where(o_row[:, None] == o_row[None, :], b_near, 0.0), axis=1)
    b_near = tl.where(m_row[None, :], (b_near - b_diagonal[:, None]) * (octaves * sign), -float("inf"))
    b_far = tl.where(m_other[None, :], (b_far - b_diagonal[:, None]) * (octaves * sign), -float("inf"))
    b_max = tl.maximum(tl.max(b_near, axis=1), tl.max(b_far, axis=1))
    b_near = exp2(b_near - b_max[:, None], EMULATE)
    b_far = exp2(b_far - b_max[:, None], EMULATE)
    b_sum = tl.sum(b_near, axis=1) + tl.sum(b_far, axis=1)
    b_seen = b_max + log2(b_sum, EMULATE) + b_own * octaves
    tl.store(p_seen + packed_row + o_row, b_seen / tl.load(p_score_scale + i_head))

    b_near = round_to(b_near, p_v.dtype.element_ty, EMULATE)
    b_far = round_to(b_far, p_v.dtype.element_ty, EMULATE)
    p_row = rows_at(out, i_head, row)
    for FIRST in tl.static_range(0, D, CHANNELS):
        b_v = load_rows(v, i_head, row, m_row, CHANNELS, FIRST)
        b_out = product(b_near, b_v, tl.zeros([ROWS, CHANNELS], tl.float32), EMULATE)
        b_v = load_rows(v, i_head, other, m_other, CHANNELS, FIRST)
        b_out = product(b_far, b_v, b_out, EMULATE) / b_sum[:, None]
        b_out = round_to(b_out, p_out.dtype.element_ty, EMULATE)
        tl.store(p_row[:, None] + (FIRST + tl.arange(0, CHANNELS))[None, :], b_out, mask=m_row[:, None])
