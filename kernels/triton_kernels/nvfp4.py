"""NVFP4 in Triton: conversions to E2M1 and UE4M3, and the scaled 4-bit product, behind one emulation switch.

``EMULATE`` off uses the instructions of Blackwell. On, the same functions do the same arithmetic with numbers that
half and float32 hold exactly, so that a kernel runs unchanged on other cards and in Triton's interpreter. The
specification is formats.py: rounding to nearest, ties to even, saturating.
"""

import triton
import triton.language as tl

ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: float32 steps by 1 there
TOP_CODE = tl.constexpr(126)  # UE4M3 bits of 448
ONE_SIXTH = tl.constexpr(1 / 6)
STEPS = tl.constexpr(0x65201)  # from the code that maps a group's largest to 6, plus 1, four bits each: 0, -1, 1, 4, 5


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
def encode_ue4m3(x, EMULATE: tl.constexpr):
    """UE4M3 bits (uint8) of x >= 0."""
    if EMULATE:
        return bits_of_ue4m3(round_ue4m3(x))
    else:
        return tl.minimum(x, 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


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
    """float32 value of E2M1 bits (int32, 0..15): moved to float32's place they are 2^-126 of it."""
    return ((code & 7) << 22 | (code & 8) << 28).to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def round_e2m1(x, EMULATE: tl.constexpr):
    """Nearest E2M1 number of x, as float32."""
    if EMULATE:
        magnitude = tl.minimum(tl.abs(x), 6.0)
        # E2M1 steps by half the power of two below a number, by a half below 1. Adding 1.5 * 2^23 steps leaves steps.
        power = (tl.maximum(magnitude, 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        rounder = power * (0.5 * ROUNDER)
        rounded = ((magnitude + rounder) - rounder).to(tl.int32, bitcast=True)
        return (rounded | (x.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b8 code;
            .reg .b16 low, high;
            .reg .b32 both;
            cvt.rn.satfinite.e2m1x2.f32 code, $3, $2;
            cvt.rn.f16x2.e2m1x2 both, code;
            mov.b32 {low, high}, both;
            cvt.f32.f16 $0, low;
            cvt.f32.f16 $1, high;
            }""",
            "=f,=f,f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )


@triton.jit
def inverse_of(scale, EMULATE: tl.constexpr):
    """``1 / scale`` of UE4M3 numbers; zero for zero, so that a group whose scale is zero is stored as zeros."""
    safe = tl.maximum(scale, 2.0**-9)
    if EMULATE:
        inverse = 1.0 / safe
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [safe], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.where(scale > 0.0, inverse, 0.0)


@triton.jit
def squared_error(x, scale, EMULATE: tl.constexpr):
    """[N]: what rounding groups x [N, 16] costs under scales [N]."""
    error = round_e2m1(x * inverse_of(scale, EMULATE)[:, None], EMULATE) * scale[:, None] - x
    return tl.sum(error * error, axis=1)


@triton.jit
def closest_scales(x, candidates, EMULATE: tl.constexpr):
    """UE4M3 bits, int32 [N], that round groups x [N, 16] with least error, of the first ``candidates`` of STEPS."""
    at_6 = encode_ue4m3(tl.max(tl.abs(x), axis=1) * ONE_SIXTH, EMULATE).to(tl.int32)
    best, least = at_6, tl.full([x.shape[0]], float("inf"), tl.float32)
    # Not unrolled: Triton takes half a minute to compile five trials of each of eight groups, and they spill.
    for i_candidate in range(candidates):
        step = ((STEPS >> (4 * i_candidate)) & 15) - 1
        code = tl.minimum(tl.maximum(at_6 + step, 0), TOP_CODE)
        error = squared_error(x, decode_ue4m3(code), EMULATE)
        best = tl.where(error < least, code, best)
        least = tl.minimum(error, least)
    return best


@triton.jit
def round_groups(x, candidates, EMULATE: tl.constexpr):
    """Groups x [N, 16] in NVFP4: UE4M3 bits [N], packed codes [N, 8], and what is lost [N, 16], stored minus x."""
    N: tl.constexpr = x.shape[0]
    bits = closest_scales(x, candidates, EMULATE)
    scale = decode_ue4m3(bits)
    ratio = x * inverse_of(scale, EMULATE)[:, None]
    ratio = tl.where((scale > 0.0)[:, None], ratio, 0.0)  # no zeros with the sign of what is lost
    even, odd = tl.split(tl.reshape(ratio, [N, 8, 2]))
    lost = round_e2m1(ratio, EMULATE) * scale[:, None] - x
    return bits.to(tl.uint8), pack_e2m1(even, odd, EMULATE), lost


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
