"""4-bit attention for workstation Blackwell (sm_120, sm_121): NVFP4 queries, keys, probabilities and values.

One program: 128 query rows of one head, all keys in tiles of 128. The recurrence is ``attend4`` of
attend/reference.py, in octaves (c is ``score_scale``):

    s     = q k^T + bias                               scaled 4-bit product; the bias starts the accumulator
    gamma = UE4M3(max over 16 keys of 2^(c (s - m)) 2688 / 6)
    P     = E2M1(2^(c s - (c m - log2 2688 + log2 gamma)))     the exponential comes out divided by its scale
    o     = alpha o + r mean + (P gamma) v             r: row sum before rounding; without means, of the rounded P

``bias`` [query block, key] is what the scores lost with the block mean of q, and minus infinity for padding keys. Where
own_block4.py has attended to a query's own block, the bias leaves its keys out, and the recurrence starts with them
seen: m is the log-sum-exp of their scores and l is 2688. Their output is added at the end.

No probability goes through shared memory. Keys are stored in ``KEY_ORDER`` (quantize/triton4.py), so that the scores
a thread owns after the first product are eight neighbouring keys for the second: P is relabelled and packed in
registers. Maxima are taken on the unpermuted view: one transpose-free path between the two products keeps each warp on
16 whole rows.
"""

import triton
import triton.language as tl

from .nvfp4 import encode_scales, exp2, load_scales, log2, pack_e2m1, scaled_product
from .rows import Rows, rows_at

BLOCK = tl.constexpr(128)
LOG2_6 = tl.constexpr(2.584962500721156)
TOP = tl.constexpr(2688.0)  # a row maximum: 448 * 6
LOG2_2688 = tl.constexpr(11.392317422778762)
SMALLEST_SCALE = tl.constexpr(2.0**-9)  # of UE4M3, above 0
ONES = tl.constexpr(0x22)  # E2M1 1.0, twice
SCALE_ONE = tl.constexpr(0x38)  # UE4M3 1.0
SUM_COLUMNS = tl.constexpr(16)


@triton.jit
def row_sums(packed, scales, before, EMULATE: tl.constexpr):
    """``before`` [BLOCK, 16] plus, in every column, the row sums of the rounded probabilities."""
    ones = tl.full([SUM_COLUMNS, BLOCK // 2], ONES, tl.uint8)
    if EMULATE:
        one_scales = tl.full([SUM_COLUMNS, BLOCK // 16], 1.0, tl.float32)
    else:
        one_scales = tl.full([SUM_COLUMNS, BLOCK // 16], SCALE_ONE, tl.uint8).to(tl.float8e4nv, bitcast=True)
    return scaled_product(packed, scales, ones, one_scales, before, BLOCK, SUM_COLUMNS, BLOCK, EMULATE)


@triton.jit(
    do_not_specialize=[
        *("first_head", "first_block", "launch_blocks", "heads", "q_tokens", "q_blocks", "kv_blocks"),
        *("bias_head", "bias_block", "out_b", "out_h", "out_s"),
    ]
)
def attention4_fwd_kernel(
    p_q: "*u8",  # [BH, q_blocks * BLOCK, D / 2]
    p_q_scales: "*u8",  # [BH, q_blocks * BLOCK, D / 16]
    p_k: "*u8",  # [BH, kv_blocks * BLOCK, D / 2], rows in KEY_ORDER
    p_k_scales: "*u8",  # [BH, kv_blocks * BLOCK, D / 16], rows in KEY_ORDER
    p_v: "*u8",  # [BH, kv_blocks, D, BLOCK / 2]
    p_v_scales: "*u8",  # [BH, kv_blocks, D, BLOCK / 16]
    p_v_scale: "*fp32",  # [BH, D]
    p_means: "*fp32",  # [BH, kv_blocks, D], in units of v_scale
    p_score_scale: "*fp32",  # [BH], octaves per unit of q k^T
    p_bias: "*fp32",  # [heads, query blocks, kv_blocks * BLOCK] of this launch, keys in KEY_ORDER
    p_seen: "*fp32",  # [BH, q_blocks * BLOCK]: log2 of the own block's sum, in units of q k^T; read only if OWN
    p_out,  # [B, heads, q_tokens, D], last dimension contiguous; if OWN, holds the own block's output
    first_head: tl.int32,
    first_block: tl.int32,
    launch_blocks: tl.int32,  # query blocks of this launch, for each of its heads
    heads: tl.int32,
    q_tokens: tl.int32,
    q_blocks: tl.int32,
    kv_blocks: tl.int32,
    bias_head: tl.int64,  # strides of the bias
    bias_block: tl.int64,
    out_b: tl.int64,  # strides of the output in words of 8 elements
    out_h: tl.int64,
    out_s: tl.int64,
    D: tl.constexpr,
    MEANS: tl.constexpr,
    OWN: tl.constexpr,
    EMULATE: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_launch = tl.program_id(0) // launch_blocks
    i_row = tl.program_id(0) % launch_blocks
    i_block = first_block + i_row
    i_head = (first_head + i_launch).to(tl.int64)
    o_row = i_block * BLOCK + tl.arange(0, BLOCK)
    o_key = tl.arange(0, BLOCK)
    o_channel = tl.arange(0, D)
    o_byte = tl.arange(0, D // 2)
    o_scale = tl.arange(0, D // 16)

    q_row = i_head * q_blocks * BLOCK + o_row
    b_q = tl.load(p_q + q_row[:, None] * (D // 2) + o_byte[None, :])
    b_q_scales = load_scales(p_q_scales + q_row[:, None] * (D // 16) + o_scale[None, :], EMULATE)
    score_scale = tl.load(p_score_scale + i_head)

    first_tile = i_head * kv_blocks
    k_row = first_tile * BLOCK + o_key
    p_k_tile = p_k + k_row[:, None] * (D // 2) + o_byte[None, :]
    p_k_scales_tile = p_k_scales + k_row[:, None] * (D // 16) + o_scale[None, :]
    p_v_tile = p_v + first_tile * (D * BLOCK // 2) + o_channel[:, None] * (BLOCK // 2)
    p_v_tile += tl.arange(0, BLOCK // 2)[None, :]
    p_v_scales_tile = p_v_scales + first_tile * (D * BLOCK // 16) + o_channel[:, None] * (BLOCK // 16)
    p_v_scales_tile += tl.arange(0, BLOCK // 16)[None, :]
    p_means_tile = p_means + first_tile * D + o_channel
    bias_row = i_launch * bias_head + i_row * bias_block
    p_bias_tile = p_bias + tl.multiple_of(bias_row, BLOCK) + o_key

    b_max = tl.full([BLOCK], -float("inf"), tl.float32)
    b_sum = tl.zeros([BLOCK], tl.float32)
    b_sums = tl.zeros([BLOCK, SUM_COLUMNS], tl.float32)
    b_out = tl.zeros([BLOCK, D], tl.float32)
    if OWN:  # its output is added at the end
        b_max = tl.load(p_seen + q_row)
        b_sum += TOP
        b_sums += TOP
    for i_tile in tl.range(0, kv_blocks, num_stages=STAGES):  # said here, it also holds for bias and means
        b_k = tl.load(p_k_tile + i_tile * (BLOCK * D // 2))
        b_k_scales = load_scales(p_k_scales_tile + i_tile * (BLOCK * D // 16), EMULATE)
        b_bias = tl.broadcast_to(tl.load(p_bias_tile + i_tile * BLOCK)[None, :], [BLOCK, BLOCK])
        b_s = scaled_product(b_q, b_q_scales, b_k, b_k_scales, b_bias, BLOCK, BLOCK, D, EMULATE)

        # A column is (group of 32, q, half, t, e) and holds key 16 half + 8 t + 2 q + e of the group.
        b_s = tl.reshape(b_s, [BLOCK, BLOCK // 32, 4, 2, 2, 2])
        group_max = tl.max(tl.max(tl.max(b_s, axis=5), axis=2), axis=3)  # of 16 keys: [BLOCK, 4, 2]
        new_max = tl.maximum(b_max, tl.max(tl.max(group_max, axis=1), axis=1))
        alpha = exp2((b_max - new_max) * score_scale, EMULATE)
        b_max = new_max
        offset = new_max * score_scale - LOG2_2688
        ideal = exp2(group_max * score_scale - (offset + LOG2_6)[:, None, None], EMULATE)
        b_p_scales, decoded_scales = encode_scales(ideal, EMULATE)
        divisor = tl.maximum(decoded_scales, SMALLEST_SCALE)  # a group scaled by 0 still counts in the row sum
        shift = log2(divisor, EMULATE) + offset[:, None, None]
        b_p = exp2(b_s * score_scale - shift[:, :, None, :, None, None], EMULATE)

        even, odd = tl.split(b_p)
        b_packed = tl.reshape(pack_e2m1(even, odd, EMULATE), [BLOCK, BLOCK // 32, 4, 4])
        b_packed = tl.reshape(tl.permute(b_packed, [0, 1, 3, 2]), [BLOCK, BLOCK // 2])
        b_p_scales = tl.reshape(b_p_scales, [BLOCK, BLOCK // 16])

        b_v = tl.load(p_v_tile + i_tile * (D * BLOCK // 2))
        b_v_scales = load_scales(p_v_scales_tile + i_tile * (D * BLOCK // 16), EMULATE)
        b_out = b_out * alpha[:, None]
        if MEANS:
            quarters = tl.sum(tl.sum(b_p, axis=5), axis=2) * divisor[:, :, :, None]
            tile_sum = tl.sum(tl.sum(tl.sum(quarters, axis=1), axis=2), axis=1)
            b_sum = b_sum * alpha + tile_sum
            b_out += tile_sum[:, None] * tl.load(p_means_tile + i_tile * D)[None, :]
        else:
            b_sums = row_sums(b_packed, b_p_scales, b_sums * alpha[:, None], EMULATE)
        b_out = scaled_product(b_packed, b_p_scales, b_v, b_v_scales, b_out, BLOCK, D, BLOCK, EMULATE)

    if not MEANS:
        b_sum = tl.max(b_sums, axis=1)
    b_out = b_out / b_sum[:, None] * tl.load(p_v_scale + i_head * D + o_channel)[None, :]
    out = Rows(p_out, heads, q_tokens, out_b, out_h, out_s)
    p_rows = rows_at(out, i_head, o_row)[:, None] + o_channel[None, :]
    m_rows = o_row[:, None] < q_tokens
    if OWN:
        share = TOP * exp2((tl.load(p_seen + q_row) - b_max) * score_scale, EMULATE) / b_sum
        b_out += share[:, None] * tl.load(p_rows, mask=m_rows, other=0.0).to(tl.float32)
    tl.store(p_rows, b_out.to(p_out.dtype.element_ty), mask=m_rows)
