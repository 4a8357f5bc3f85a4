// From scores to codes, and from codes to the bytes of probabilities (ExpCast). One code is 1/8 octave.
#pragma once
#include "common_sm90.cuh"

// Code of the running maximum. What lies 14.25 octaves below is code 0 and lost: with 100 and its 12.5 octaves, tens of thousands of
// small probabilities were (docs/hopper.md). The headroom up to 126 (1.5 octaves) decides how rarely a row needs a new maximum.
// Without ExpCast codes are only a scale of scores: they start 25 lower, where the probability, 2^-10.1, is rounded to zero.
constexpr int FIRST_CODE = EXPCAST ? 0 : -25;
constexpr float MAX_CODE = 114 - FIRST_CODE;
constexpr u32 LAST_CODE = 126 - FIRST_CODE;  // E4M3 448; 127 would be NaN
// Above so many tiles a row's first maximum stands lower, with ExpCast at 94: as it grows, few steps need a new one. Not where a few
// outliers of the first tile are the maximum (raise_maximum): it would hardly grow, and small probabilities were lost.
constexpr int SHORT_TILES = 32;
constexpr int ROOM_256THS = 45;  // of MAX_CODE, by which it stands lower
constexpr u32 OFFSET_SCORE_LIMIT = 0x03ff03ffu;  // 1023, twice: the largest subnormal half, above the largest code for any q_scale
constexpr int NO_MAX_YET = 20000;                // above every offset (at most 8065 + 869), and no sum with a score leaves 16 bits

// Start value of the score of a padding key, whose k8 row TMA has zeroed: -16384 units of 256. Every real score is at least -8065
// and every offset at most 8934, so its code is 0, and offset + score stays in 16 bits for the smallest offset, -8063, too.
constexpr u32 PADDING_SCORE = static_cast<u32>(-16384 * 256);
static_assert(-16384 + 8934 < 0 && -16384 - 8063 >= -32768, "a padding key has code 0");

// What a thread needs to turn the scores of one of its rows into codes. A score is the bits 8..23 of q8 . k8, so 256 units:
//   u = clamp(score + offset, 0, 1023);  code = max(0, round(u * scale + shift))
// u is kept as an integer, which *is* the bits of a subnormal half, and so is the code: one half FMA does the second line. Without
// ExpCast codes count from FIRST_CODE, and the probability is the exponential of the unrounded code.
// Everything but max_u twice, for packed instructions.
struct RowCodes {
  u32 scale;   // half: codes per 256 units
  u32 shift;   // half, in units of 2^-24: makes the code of u == max_u equal to MAX_CODE; in (-scale, 0]
  u32 offset;  // s16: u of the running maximum, max_u as a rule, minus that maximum; or NO_MAX_YET
  int max_u;

  DEVICE void start(float codes_per_unit) {
    const float largest = ceilf(MAX_CODE / codes_per_unit);
    scale = broadcast_half(codes_per_unit);
    shift = broadcast_half((MAX_CODE - largest * codes_per_unit) * 0x1p-24f);
    offset = broadcast_low_16(NO_MAX_YET);
    max_u = static_cast<int>(largest);
  }
};

DEVICE u32 clamped_units(u32 score_0, u32 score_1, const RowCodes& row) {
  return __viaddmin_s16x2_relu(__byte_perm(score_0, score_1, 0x6521), row.offset, OFFSET_SCORE_LIMIT);
}

// E4M3 bytes of the probabilities of scores `first` and `first` + 2 of eight pairs.
#if EXPCAST
DEVICE u32 four_probabilities(const u32 (&)[8], const u32 (&codes)[8], int first, const RowCodes&) {
  return __byte_perm(codes[first], codes[first + 2], 0x6420);  // the codes themselves
}
#else
DEVICE u32 two_probabilities(u32 units, const RowCodes& row) {
  constexpr float octaves = 16777216.f / 8;  // of a code whose bits are read as a half
  const float scale = half_low(row.scale) * octaves, shift = half_low(row.shift) * octaves + (FIRST_CODE - 56) / 8.f;
  return pack_e4m3(exp2_approx(half_low(units) * scale + shift), exp2_approx(half_high(units) * scale + shift));
}
DEVICE u32 four_probabilities(const u32 (&units)[8], const u32 (&)[8], int first, const RowCodes& row) {
  return two_probabilities(units[first], row) | two_probabilities(units[first + 2], row) << 16;
}
#endif

// Writes the probabilities' bytes, ready as A fragments of P V; returns the largest codes as packed half.
DEVICE u32 scores_to_codes(u32 (&codes_rmem)[16], const u32 (&scores_rmem)[64], const RowCodes (&rows)[2]) {
  u32 largest[4];
#pragma unroll
  for (int g = 0; g < 4; g++) {
    u32 units[8], codes[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      units[i] = clamped_units(scores_rmem[g * 16 + 2 * i], scores_rmem[g * 16 + 2 * i + 1], rows[i & 1]);
      codes[i] = half2_fma_relu(units[i], rows[i & 1].scale, rows[i & 1].shift);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 of_two = half2_max(codes[i], codes[i + 4]);
      largest[i] = g == 0 ? of_two : half2_max(largest[i], of_two);
      codes_rmem[g * 4 + i] = four_probabilities(units, codes, i < 2 ? i : i + 2, rows[i & 1]);
    }
  }
  return half2_max(half2_max(half2_max(largest[0], largest[1]), largest[2]), largest[3]);
}

// A code above LAST_CODE in the warp: the addition carries it into bit 15.
DEVICE bool any_code_overflows(u32 largest) {
  constexpr u32 carry = 0x8000 - (LAST_CODE + 1);
  return __any_sync(~0u, ((largest + (carry << 16 | carry)) & 0x80008000u) != 0u);
}

// New maxima of the thread's rows, from the scores. `growing`: lower where each eighth of the keys (0, 8, 16, ... and so on) has one
// within a quarter of MAX_CODE, with ExpCast 3.5 octaves.
DEVICE void raise_maximum(RowCodes (&rows)[2], const u32 (&scores)[64], bool growing) {
  u32 top_0 = 0x80008000u, top_1 = 0x80008000u;
#pragma unroll
  for (int i = 0; i < 64; i += 4) {
    top_0 = __vmaxs2(top_0, __byte_perm(scores[i], scores[i + 1], 0x6521));
    top_1 = __vmaxs2(top_1, __byte_perm(scores[i + 2], scores[i + 3], 0x6521));
  }
  const u32 even = __byte_perm(top_0, top_1, 0x5410), odd = __byte_perm(top_0, top_1, 0x7632);  // (row, row + 8)
  u32 top = __vmaxs2(even, odd), lowest = __vmins2(even, odd);
  lowest = __vmins2(lowest, __shfl_xor_sync(~0u, lowest, 1));
  lowest = __vmins2(lowest, __shfl_xor_sync(~0u, lowest, 2));
  top = __vmaxs2(top, __shfl_xor_sync(~0u, top, 1));
  top = __vmaxs2(top, __shfl_xor_sync(~0u, top, 2));
  auto place = [&](RowCodes& row, int highest, int lowest) {
    const bool lower = growing && 4 * (highest - lowest) <= row.max_u;
    const int u = lower ? row.max_u - row.max_u * ROOM_256THS / 256 : row.max_u;
    row.offset = broadcast_low_16(min(signed_low_16(row.offset), u - highest));
  };
  place(rows[0], signed_low_16(top), signed_low_16(lowest));
  place(rows[1], signed_high_16(top), signed_high_16(lowest));
}
