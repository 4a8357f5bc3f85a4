"""Conversions shared by the Triton kernels."""

import triton
import triton.language as tl

WORD: tl.constexpr = tl.constexpr(8)  # strides of tensors from outside count words of 8 elements, 16 bytes


@triton.jit
def encode_e4m3(x, EMULATE: tl.constexpr):
    """E4M3 bits (uint8) of float32 ``x``, |x| <= 448, to nearest, ties to even.

    The emulation is for Triton's interpreter, whose own cast does not carry into the exponent.
    """
    if EMULATE:
        magnitude = tl.abs(x)
        bits = magnitude.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # bias 127 - 7, 3 of 23 mantissa bits kept
        # Below 2^-6 codes count steps of 2^-9; adding 1.5 * 2^14 makes the rounding of float32 that of those steps.
        subnormal = (magnitude + 24576.0).to(tl.uint32, bitcast=True) - 0x46C00000
        code = tl.where(bits < 0x3C800000, subnormal, normal)
        return (code | ((x.to(tl.uint32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def round_to(x, dtype: tl.constexpr, EMULATE: tl.constexpr):
    """float32 ``x`` in a 16-bit format, to nearest, ties to even; the interpreter's own cast to bf16 cuts off."""
    if EMULATE and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def in_key_order(x, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """[ROWS, KEYS] with the keys of each group of 32 in KEY_ORDER.

    Key 16 a + 8 b + 2 c + e goes to 16 a + 4 c + 2 b + e. The scores of a thread of m16n8 accumulators are then four
    neighbours, its operand of the next product.
    """
    parts = tl.reshape(x, (ROWS, KEYS // 32, 2, 2, 4, 2))
    return tl.reshape(tl.permute(parts, (0, 1, 2, 4, 3, 5)), (ROWS, KEYS))
