// Row sums of the 8-bit attention kernel: the denominator, and the weights of the block means.
#pragma once
#include "common_sm90.cuh"

// Of a thread's rows (row, row + 8).
struct RowSums {
  u32 of_group[4] = {0, 0, 0, 0};  // half sums of the last GROUP tiles, newest on top: A fragment of the mean product
  float of_row[2] = {0.f, 0.f};    // over the tiles whose number % 4 == lane % 4

  // Sums of four tiles, one per thread of a row, as half.
  DEVICE void push(u32 newest) {
    of_group[0] = __byte_perm(of_group[0], of_group[2], 0x5432);
    of_group[2] = __byte_perm(of_group[2], newest, 0x5432);
    of_group[1] = __byte_perm(of_group[1], of_group[3], 0x5432);
    of_group[3] = __byte_perm(of_group[3], newest, 0x7632);
  }

  // The same from the accumulator, where they lie behind 128 channels. The denominator uses the rounded sums that the means are
  // weighted with, so the weights of the means add up to one: a constant v comes out exactly.
  DEVICE void collect(float (&residual)[68]) {
    const u32 newest = pack_half(residual[64], residual[66]);
    push(newest);
    of_row[0] += half_low(newest);
    of_row[1] += half_high(newest);
#pragma unroll
    for (int i = 64; i < 68; i++) zero_in_place(residual[i]);
  }

  DEVICE void scale_group(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      of_group[i] = pack_half(half_low(of_group[i]) * factor[i & 1], half_high(of_group[i]) * factor[i & 1]);
  }
};
