"""From q, k, v to 8-bit operands: one program per block of 128 tokens of one head (quantize/reference.py).

Rows are read through their strides, keys and values also through the permutation; outputs are contiguous. Rotation is
a product with the matrix of signs: exact inputs, float32 sums.
"""

import triton
import triton.language as tl

from .common import WORD, encode_e4m3, in_key_order, round_to

BLOCK: tl.constexpr = tl.constexpr(128)
INT8_MAX: tl.constexpr = tl.constexpr(127.0)
E4M3_MAX: tl.constexpr = tl.constexpr(448.0)
TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)
NOT_FINITE: tl.constexpr = tl.constexpr(1)
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _load_block(x, permutation, i_head, i_block, H, S, x_b, x_h, x_s, D: tl.constexpr, GATHER: tl.constexpr):
    """[BLOCK, D] rows ``i_block`` of a head in permuted order, zeros behind the last, and which rows are real."""
    o_row = i_block * BLOCK + tl.arange(0, BLOCK)
    m_row = o_row < S
    if GATHER:
        o_row = tl.load(permutation + i_head * S + o_row, mask=m_row, other=0)
    p_x = x + (i_head // H * x_b + i_head % H * x_h) * WORD + (o_row.to(tl.int64) * x_s * WORD)[:, None]
    p_x += tl.arange(0, D)[None, :]
    return tl.load(p_x, mask=m_row[:, None], other=0.0), m_row


@triton.jit
def _report_not_finite(b_x, flags):
    if tl.max((~(tl.abs(b_x) <= LARGEST)).to(tl.int32)) > 0:
        tl.atomic_or(flags, NOT_FINITE)


@triton.jit
def _positive(scale):
    return tl.where(scale > TINY, scale, 1.0)


@triton.jit(do_not_specialize=["H", "S", "x_b", "x_h", "x_s", "root", "sign", "codes_per_unit"])
def quantize_rows_kernel(
    x,  # [B, H, S, D] bf16 or fp16, strides in words
    permutation: "*i32",  # [BH, S], read where GATHER
    signs,  # [D, D] the Hadamard matrix of +-1, x's dtype
    mean: "*fp32",  # [BH, D] rotated mean over tokens, without the factor ``root``; read where CENTRE
    codes: "*u8",  # out [BH, NB, BLOCK, D] int8 or E4M3 bits, zeros behind the last token
    scale: "*fp32",  # out [BH, NB]
    flags: "*i32",  # out, bit 0: some x is not finite, or so large that its rotation is not
    H: tl.int32, S: tl.int32, x_b: tl.int64, x_h: tl.int64, x_s: tl.int64,
    root: tl.float32, sign: tl.float32, codes_per_unit: tl.float32,
    D: tl.constexpr, INT8: tl.constexpr, CENTRE: tl.constexpr, GATHER: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """Rotate, centre and quantize with one scale per block: ``codes * scale / codes_per_unit = sign * rotated x``.

    ``root`` is D^-0.5, ``sign`` +-1.
    """
    n_blocks = tl.cdiv(S, BLOCK)
    i_head, i_block = (tl.program_id(0) // n_blocks).to(tl.int64), tl.program_id(0) % n_blocks
    o_row, o_d = tl.arange(0, BLOCK), tl.arange(0, D)
    b_x, m_row = _load_block(x, permutation, i_head, i_block, H, S, x_b, x_h, x_s, D, GATHER)
    b_signs = tl.load(signs + o_d[:, None] * D + o_d[None, :])
    if EMULATE:  # the interpreter multiplies the bits of bf16 as integers
        b_x, b_signs = b_x.to(tl.float32), b_signs.to(tl.float32)
    b_y = tl.dot(b_x, b_signs, input_precision="ieee")
    if CENTRE:
        b_y = tl.where(m_row[:, None], b_y - tl.load(mean + i_head * D + o_d)[None, :], 0.0)
    _report_not_finite(b_y, flags)  # every x is in D of these, which may also be too large themselves
    b_y *= root
    largest = INT8_MAX if INT8 else E4M3_MAX
    b_scale = _positive(tl.div_rn(tl.max(tl.abs(b_y)), largest))
    b_ratio = tl.div_rn(b_y * sign, tl.zeros_like(b_y) + b_scale)
    if INT8:
        # Adding 1.5 * 2^23 rounds to a whole number, half to even, and leaves its low byte in the low byte.
        b_codes = (b_ratio + 12582912.0).to(tl.int32, bitcast=True).to(tl.uint8)
    else:
        b_codes = encode_e4m3(tl.minimum(tl.maximum(b_ratio, -E4M3_MAX), E4M3_MAX), EMULATE)
    p_codes = codes + (i_head * n_blocks + i_block) * (BLOCK * D) + o_row[:, None] * D + o_d[None, :]
    tl.store(p_codes, b_codes)
    tl.store(scale + i_head * n_blocks + i_block, b_scale * codes_per_unit)


@triton.jit(do_not_specialize=["H", "S", "v_b", "v_h", "v_s"])
def value_blocks_kernel(
    v,  # [B, H, S, D] bf16 or fp16, strides in words
    permutation: "*i32",  # [BH, S], read where GATHER
    means,  # out [BH, NB, D], v's dtype
    maxima: "*fp32",  # out [BH, NB, D] largest |v - mean| of a channel in a block
    flags: "*i32",
    H: tl.int32, S: tl.int32, v_b: tl.int64, v_h: tl.int64, v_s: tl.int64,
    D: tl.constexpr, MEANS: tl.constexpr, GATHER: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """Mean of each block, as stored in 16 bit, and how far values lie from it."""
    n_blocks = tl.cdiv(S, BLOCK)
    i_head, i_block = (tl.program_id(0) // n_blocks).to(tl.int64), tl.program_id(0) % n_blocks
    o_d = tl.arange(0, D)
    b_v, m_row = _load_block(v, permutation, i_head, i_block, H, S, v_b, v_h, v_s, D, GATHER)
    b_v = b_v.to(tl.float32)
    o_out = (i_head * n_blocks + i_block) * D + o_d
    if MEANS:
        n_rows = tl.minimum(S - i_block * BLOCK, BLOCK).to(tl.float32)
        b_mean = tl.div_rn(tl.sum(b_v, 0), tl.zeros([D], tl.float32) + n_rows)
        b_mean = round_to(b_mean, v.dtype.element_ty, EMULATE)
        tl.store(means + o_out, b_mean)
        b_v = tl.where(m_row[:, None], b_v - b_mean.to(tl.float32)[None, :], 0.0)
    _report_not_finite(b_v, flags)  # a mean may be too large
    tl.store(maxima + o_out, tl.max(tl.abs(b_v), 0))


@triton.jit(do_not_specialize=["H", "S", "v_b", "v_h", "v_s"])
def quantize_values_kernel(
    v,  # [B, H, S, D] bf16 or fp16, strides in words
    permutation: "*i32",  # [BH, S], read where GATHER
    means,  # [BH, NB, D], v's dtype, read where MEANS
    v_scale: "*fp32",  # [BH, D]
    codes: "*u8",  # out [BH, NB, D, BLOCK] E4M3 bits, keys in KEY_ORDER, zeros behind the last token
    H: tl.int32, S: tl.int32, v_b: tl.int64, v_h: tl.int64, v_s: tl.int64,
    D: tl.constexpr, MEANS: tl.constexpr, GATHER: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """Residuals in units of their channel's scale, transposed."""
    n_blocks = tl.cdiv(S, BLOCK)
    i_head, i_block = (tl.program_id(0) // n_blocks).to(tl.int64), tl.program_id(0) % n_blocks
    o_key, o_d = tl.arange(0, BLOCK), tl.arange(0, D)
    b_v, m_row = _load_block(v, permutation, i_head, i_block, H, S, v_b, v_h, v_s, D, GATHER)
    b_v = b_v.to(tl.float32)
    if MEANS:
        b_mean = tl.load(means + (i_head * n_blocks + i_block) * D + o_d).to(tl.float32)
        b_v = tl.where(m_row[:, None], b_v - b_mean[None, :], 0.0)
    b_ratio = tl.div_rn(b_v, tl.zeros_like(b_v) + tl.load(v_scale + i_head * D + o_d)[None, :])
    b_codes = encode_e4m3(tl.minimum(tl.maximum(b_ratio, -E4M3_MAX), E4M3_MAX), EMULATE)
    p_codes = codes + (i_head * n_blocks + i_block) * (BLOCK * D) + o_d[:, None] * BLOCK + o_key[None, :]
    tl.store(p_codes, in_key_order(tl.trans(b_codes), D, BLOCK))
