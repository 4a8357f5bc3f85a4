// Rotation of q and k, and their INT8 codes.
//
// The rotation is the Sylvester-Hadamard matrix of 128 = 2^7 channels, without its factor 1 / sqrt(128). A thread loads 8 channels at
// a time: these are bits 2..0 of the channel, the thread's lane of the quad is bits 4 and 3, the number of the load is bits 6 and 5.
// One m16n8k16 product with a 16 x 16 matrix of signs mixes bits 4, 3, 1, 0 (inputs times +-1 are exact, the sums are FP32), three
// butterflies between registers mix bits 6, 5, 2.
#pragma once
#include "strided_sm90.cuh"

// Lanes that share a row of an accumulator are a quad.
DEVICE u32 quad_id() { return lane_id() >> 2; }
DEVICE u32 quad_lane() { return lane_id() & 3; }

// ---- signs and products -------------------------------------------------------------------------------------------------------

constexpr u32 INPUT_ONE = INPUT_FP16 ? 0x3c00 : 0x3f80;

// d[16 x 8] = a[16 x 16] b[16 x 8], inputs as they come, FP32 sums.
DEVICE void mma_m16n8k16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." INPUT_TYPE "." INPUT_TYPE ".f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));
}

// Entries (output, input) and (output, input + 1) of the matrix of signs.
DEVICE u32 sign_pair(u32 output, u32 input) {
  const u32 low = INPUT_ONE | (__popc(output & input) & 1) << 15;
  const u32 high = INPUT_ONE | (__popc(output & (input + 1)) & 1) << 15;
  return low | high << 16;
}

// Mixes the three bits of the first index.
template <int N>
DEVICE void butterflies(float (&x)[8][N]) {
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) {
#pragma unroll
    for (int piece = 0; piece < 8; piece++) {
      if (piece & distance) continue;
#pragma unroll
      for (int i = 0; i < N; i++) {
        const float a = x[piece][i], b = x[piece + distance][i];
        x[piece][i] = a + b;
        x[piece + distance][i] = a - b;
      }
    }
  }
}

// ---- rows of a warp -----------------------------------------------------------------------------------------------------------

// Two of the 16 rows of a warp, quad_id and quad_id + 8: [row][load][pair of channels].
using RowTile = u32[2][4][4];

// Two rotated rows: x[2 * load + bit 2][4 * bit 1 + 2 * row + bit 0] is channel 32 * load + 8 * quad_lane + bits 2..0 of `row`.
using RotatedRows = float[8][8];

// Row pointers stand at channel 8 * quad_lane.
DEVICE void load_tile(RowTile& tile, const u16* row_0, const u16* row_1) {
#pragma unroll
  for (int load = 0; load < 4; load++) {
    load_channels(tile[0][load], row_0 + 32 * load);
    load_channels(tile[1][load], row_1 + 32 * load);
  }
}

// Signs as the B operand of multiply_signs, for outputs whose bit 1 is 0. Column quad_id is the output: bits 2 and 1 of it are
// bits 4 and 3 of the channel, bit 0 is bit 0.
DEVICE u32 row_signs() {
  const u32 column = quad_id();
  return sign_pair((column >> 1) << 2 | (column & 1), 4 * quad_lane());
}

// The tensor cores' part of the rotation. It consumes the tile, so the next one can be loaded before the butterflies.
DEVICE void multiply_signs(RotatedRows& x, const RowTile& tile, u32 signs) {
#pragma unroll
  for (int load = 0; load < 4; load++) {
#pragma unroll
    for (int bit_2 = 0; bit_2 < 2; bit_2++) {
      const int pair = 2 * bit_2;
#pragma unroll
      for (int bit_1 = 0; bit_1 < 2; bit_1++) {
        // Outputs with bit 1 negate the inputs with bit 1.
        float d[4];
        mma_m16n8k16(d, tile[0][load][pair], tile[1][load][pair], tile[0][load][pair + 1], tile[1][load][pair + 1], signs,
                     bit_1 ? signs ^ PAIR_SIGNS : signs);
#pragma unroll
        for (int i = 0; i < 4; i++) x[2 * load + bit_2][4 * bit_1 + i] = d[i];
      }
    }
  }
}

// ---- codes --------------------------------------------------------------------------------------------------------------------

// 1.5 * 2^23: adding it rounds to the nearest integer, ties to even, whose low byte is the INT8 code.
constexpr float MAGIC = 12582912.f;
constexpr float LARGEST_CODE = 127.f;

DEVICE u32 pack_low_bytes(float a, float b, float c, float d) {
  const u32 ab = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040);
  const u32 cd = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040);
  return __byte_perm(ab, cd, 0x5410);
}

// INT8 codes of x * multiplier, of row `row` (0 or 1) of the thread; a row that is not real gets zeros. `codes` stands at channel
// 8 * quad_lane.
DEVICE void store_codes(u32* codes, bool real, const RotatedRows& x, int row, float multiplier) {
  auto code = [&](int piece, int i) { return fmaf(x[piece][i], multiplier, MAGIC); };
  auto four_codes = [&](int piece) {
    return pack_low_bytes(code(piece, 2 * row), code(piece, 2 * row + 1), code(piece, 4 + 2 * row), code(piece, 5 + 2 * row));
  };
  uint2 eight[4];
#pragma unroll
  for (int load = 0; load < 4; load++) {
    eight[load] = make_uint2(four_codes(2 * load), four_codes(2 * load + 1));
    if (!real) eight[load] = make_uint2(0u, 0u);
  }
#pragma unroll
  for (int load = 0; load < 4; load++) store_as(codes + 8 * load, eight[load]);
}

// ---- maxima -------------------------------------------------------------------------------------------------------------------

DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEVICE float warp_max(float x) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
  return x;
}

// Largest magnitude of row `row` (0 or 1) of the thread, all channels.
DEVICE float largest_of_row(const RotatedRows& x, int row) {
  float largest = 0.f;
#pragma unroll
  for (int piece = 0; piece < 8; piece++) {
    const float(&y)[8] = x[piece];
    largest = fmaxf(largest, fabsf(y[2 * row]));
    largest = fmaxf(largest, fmaxf(fabsf(y[2 * row + 1]), fabsf(y[4 + 2 * row])));
    largest = fmaxf(largest, fabsf(y[5 + 2 * row]));
  }
  return quad_max(largest);
}
