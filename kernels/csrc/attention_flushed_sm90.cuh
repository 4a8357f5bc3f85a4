// The output of the tiles that have left the tensor cores' accumulator.
#pragma once
#include "attention_load_sm90.cuh"

// Of the thread's rows (row, row + 8): packed half in shared memory, eight times four words for every thread. The output is what lies
// there times `factor`.
struct Flushed {
  u32 out_smem;
  float factor[2] = {1.f, 1.f};
  DEVICE u32 place(int i) const { return out_smem + 16 * (i * CONSUMERS + thread_index() - 128); }

  DEVICE void clear() const {
#pragma unroll
    for (int i = 0; i < 8; i++) shared_store(place(i), make_uint4(0, 0, 0, 0));
  }

  // Adds the accumulator. What lies there is kept divided by 2 * 2^exponent(row sum): below 60000 + 448 whatever the scores.
  DEVICE void add(const float (&residual)[68], const float (&row_sum)[2]) {
    u32 keep[2];
    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u32 exponent = __float_as_uint(sum_over_row(row_sum[r])) & 0x7f800000u;
      scale[r] = __uint_as_float(0x7e800000u - exponent);
      keep[r] = broadcast_half(factor[r] * scale[r]);
      factor[r] = __uint_as_float(exponent + 0x00800000u);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
      uint4 out = shared_load<uint4>(place(i));
      auto add_two = [&](u32& pair, int first) {
        const int r = (first >> 1) & 1;
        pair = half2_fma(pair, keep[r], pack_half(residual[first] * scale[r], residual[first + 1] * scale[r]));
      };
      add_two(out.x, 8 * i);
      add_two(out.y, 8 * i + 2);
      add_two(out.z, 8 * i + 4);
      add_two(out.w, 8 * i + 6);
      shared_store(place(i), out);
    }
  }

  // Adds the output to the accumulator, in float.
  DEVICE void add_to(float (&residual)[68]) const {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint4 out = shared_load<uint4>(place(i));
      auto add_two = [&](u32 pair, int first) {
        const float of_row = factor[(first >> 1) & 1];
        residual[first] = fmaf(half_low(pair), of_row, residual[first]);
        residual[first + 1] = fmaf(half_high(pair), of_row, residual[first + 1]);
      };
      add_two(out.x, 8 * i);
      add_two(out.y, 8 * i + 2);
      add_two(out.z, 8 * i + 4);
      add_two(out.w, 8 * i + 6);
    }
  }
};
