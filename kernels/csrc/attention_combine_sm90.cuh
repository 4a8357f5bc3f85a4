// Puts the parts of the split pairs' rows together: sum of weight * output over the parts, by sum of weights.
#pragma once
#include "attention_schedule_sm90.cuh"

constexpr int COMBINE_THREADS = 128;

// A warp takes one query row, a lane four of its channels. Grid: split pairs * CLUSTER * 128 / (COMBINE_THREADS / 32) blocks.
// Arguments as of attention_fwd_kernel, behind which it is launched; it may be brought in while that one ends.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
attention_combine_kernel(const float* __restrict__ q_scale_gmem, const float* __restrict__ v_scale_gmem, u16* __restrict__ out_gmem,
                      i64 out_stride_b, i64 out_stride_h, i64 out_stride_s, int s_q, int s_q_pad, int s_kv, int heads,
                      const __grid_constant__ TileSchedule schedule) {
  constexpr int ROWS = CLUSTER * BLOCK_Q;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int index = blockIdx.x * (COMBINE_THREADS / 32) + threadIdx.x / 32, channel = threadIdx.x % 32 * 4;
  const int pair = schedule.whole_pairs + index / ROWS, bh = pair / schedule.q_tile_pairs;
  const int row = pair % schedule.q_tile_pairs * ROWS + index % ROWS;
  if (row >= s_q) return;

  const int part_keys = schedule.part_tiles * BLOCK_KV, parts = (s_kv + part_keys - 1) / part_keys;
  auto number = [&](int part) { return part * schedule.split_pairs * ROWS + index; };
  int offset = schedule.part_row_gmem[number(0)].offset;  // the smallest: of the largest maximum
  for (int part = 1; part < parts; part++) offset = min(offset, schedule.part_row_gmem[number(part)].offset);

  const float octaves = q_scale_gmem[static_cast<i64>(bh) * s_q_pad + row] * .125f;
  float sum = 0.f, total[4] = {0.f, 0.f, 0.f, 0.f};
  for (int part = 0; part < parts; part++) {
    const PartRow of_part = schedule.part_row_gmem[number(part)];
    const float weight = of_part.row_sum * exp2_approx(static_cast<float>(offset - of_part.offset) * octaves);
    const u16* four = schedule.part_out_gmem + static_cast<i64>(number(part)) * HEAD_DIM + channel;
    const uint2 halves = *reinterpret_cast<const uint2*>(four);
    sum += weight;
    total[0] += weight * half_low(halves.x);
    total[1] += weight * half_high(halves.x);
    total[2] += weight * half_low(halves.y);
    total[3] += weight * half_high(halves.y);
  }

  const float4 v_scale = *reinterpret_cast<const float4*>(v_scale_gmem + static_cast<i64>(bh) * HEAD_DIM + channel);
  u32* out = reinterpret_cast<u32*>(out_gmem + (bh / heads) * out_stride_b + (bh % heads) * out_stride_h + row * out_stride_s + channel);
  out[0] = pack_output<OUT_HALF>(total[0] / sum * v_scale.x, total[1] / sum * v_scale.y);
  out[1] = pack_output<OUT_HALF>(total[2] / sum * v_scale.z, total[3] / sum * v_scale.w);
}
