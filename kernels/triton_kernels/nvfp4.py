"""NVFP4 in Triton: conversions to E2M1 and UE4M3, and the scaled 4-bit product, behind one emulation switch.

``EMULATE`` off uses the instructions of Blackwell. On, the same functions do the same arithmetic with numbers that
half and float32 hold exactly, so that a kernel runs unchanged on other cards and in Triton's interpreter. The
specification is formats.py: rounding to nearest, ties to even, saturating.
"""

import triton
import triton.language as tl

ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: float32 steps by 1 there


@triton.jit
def exp2(x, EMULATE: tl.constexpr):
    """``2^x``; the instruction flushes results below 2^-126 to zero."""
    if EMULATE:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def log2(x, EMULATE: tl.constexpr):
    """``log2(x)`` for normal x."""
    if EMULATE:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def round_to_integer(x):
    """Nearest integer, ties to even, for ``|x| < 2^22``."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def round_ue4m3(x):
    """Nearest UE4M3 number of x >= 0, as float32."""
    x = tl.minimum(x, 448.0)
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).to(tl.float32, bitcast=True)
    return tl.where(x < 2.0**-6, round_to_integer(x * 512.0) * 2.0**-9, normal)


@triton.jit
def bits_of_ue4m3(rounded):
    """UE4M3 bits (uint8) of a float32 that is such a number: the bias is 7 instead of 127."""
    normal = (rounded.to(tl.int32, bitcast=True) >> 20) - (120 << 3)
    return tl.where(rounded < 2.0**-6, (rounded * 512.0).to(tl.int32), normal).to(tl.uint8)


@triton.jit
def decode_ue4m3(bits):
    """float32 value of UE4M3 bits (uint8)."""
    return (bits.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def encode_scales(x, EMULATE: tl.constexpr):
    """Scales of x >= 0 as ``scaled_product`` takes them for its first factor, and their float32 values."""
    if EMULATE:
        rounded = round_ue4m3(x)
        return rounded, rounded
    else:
        scales = x.to(tl.float8e4nv)
        return scales, scales.to(tl.float32)


@triton.jit
def load_scales(pointers, EMULATE: tl.constexpr):
    """UE4M3 scales from uint8 memory as ``scaled_product`` takes them for either factor."""
    if EMULATE:
        return decode_ue4m3(tl.load(pointers))
    else:
        return tl.load(pointers).to(tl.float8e4nv, bitcast=True)


@triton.jit
def encode_e2m1(x):
    """E2M1 bits (int32) of float32 x."""
    magnitude = tl.minimum(tl.abs(x), 6.0)
    low = round_to_integer(magnitude * 2.0)
    middle = round_to_integer(magnitude) + 2.0
    high = round_to_integer(magnitude * 0.5) + 4.0
    code = tl.where(magnitude < 2.0, low, tl.where(magnitude < 4.0, middle, high)).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return code | sign


@triton.jit
def decode_e2m1(code):
    """float32 value of E2M1 bits (int32, 0..15)."""
    mantissa = code & 1
    exponent = (code >> 1) & 3
    normal = ((exponent + 126) << 23 | mantissa << 22).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, 0.5 * mantissa.to(tl.float32), normal)
    return tl.where(code & 8 != 0, -magnitude, magnitude)


@triton.jit
def round_e2m1(x):
    """Nearest E2M1 number of x, as float32 without its sign."""
    magnitude = tl.minimum(tl.abs(x), 6.0)
    # Adding 1.5 * 2^23 steps leaves steps alone.
    rounder = tl.where(magnitude < 2.0, 0.5 * ROUNDER, tl.where(magnitude < 4.0, ROUNDER, 2.0 * ROUNDER))
    return (magnitude + rounder) - rounder


@triton.jit
def pack_e2m1(low, high, EMULATE: tl.constexpr):
    """uint8: E2M1 of ``low`` in bits 0 to 3, of ``high`` in bits 4 to 7."""
    if EMULATE:
        return (encode_e2m1(low) | encode_e2m1(high) << 4).to(tl.uint8)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b8 b0, b1, b2, b3;
            cvt.rn.satfinite.e2m1x2.f32 b0, $5, $1;
            cvt.rn.satfinite.e2m1x2.f32 b1, $6, $2;
            cvt.rn.satfinite.e2m1x2.f32 b2, $7, $3;
            cvt.rn.satfinite.e2m1x2.f32 b3, $8, $4;
            mov.b32 $0, {b0, b1, b2, b3};
            }""",
            "=r,f,f,f,f,f,f,f,f",
            [low, high],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )


@triton.jit
def unpack_rows(packed, scales, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Half [ROWS, SIZE], exact, from packed E2M1 [ROWS, SIZE / 2] and float32 scales [ROWS, SIZE / 16]."""
    code = packed.to(tl.int32)
    value = tl.reshape(tl.join(decode_e2m1(code & 15), decode_e2m1(code >> 4)), [ROWS, SIZE // 16, 16])
    return tl.reshape(value * scales[:, :, None], [ROWS, SIZE]).to(tl.float16)


@triton.jit
def scaled_product(
    a, a_scales, b, b_scales, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EMULATE: tl.constexpr
):
    """``c + a b^T`` in float32 for NVFP4 a [M, K / 2] and b [N, K / 2], packed, with one scale per 16."""
    if EMULATE:
        return tl.dot(unpack_rows(a, a_scales, M, K), tl.trans(unpack_rows(b, b_scales, N, K)), c)
    else:
        return tl.dot_scaled(a, a_scales, "e2m1", tl.trans(b), b_scales, "e2m1", c)
