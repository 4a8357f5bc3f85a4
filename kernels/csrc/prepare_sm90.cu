// Preparation of the 8-bit attention operands for Hopper (sm_90a): q, k, v (strided, 16 bit) -> q8, k8, v8, scales, block means.
// Layout, roundings and a plain version of every step: quantize/hopper.py; with -DPRECISE=1: quantize/precise.py.
//
// Three launches of one-dimensional grids. The kind of work is chosen by the CTA's number, so that the tail of one kind is filled by
// the next:
//   stats   value_stats, key_stats: sums and extremes of parts of a head, in one pass over k and v.
//   finish  finish_key, finish_value: the parts folded in a fixed order to k_scale, v_scale and the keys' mean.
//   write   write_key, write_value, write_query, write_means: the operands.
// PRECISE: the attention kernel reads v itself. So value_check, which only looks for values that it cannot add up, stands in for
//          value_stats, and write_value and write_means are left out; write_key gives every block of 128 rows a scale of its own.
//
// Requires sm_90a, D = 128 and inputs whose last dimension is contiguous; INPUT_FP16 and VEC as strided_sm90.cuh says.
// Deterministic: no float atomics, every sum in a fixed order. Sequence lengths, strides and head counts are run-time values.
#include "prepare_value_sm90.cuh"
// This order lays out their shared memory.
#include "prepare_query_key_sm90.cuh"

// CTAs per SM; narrow loads need more registers.
constexpr int STATS_CTAS = VEC == 16 ? 4 : VEC == 8 ? 3 : 2;
constexpr int WRITE_CTAS = VEC == 16 ? 3 : 2;  // 4 would spill a few bytes and gains 0.4 %

extern "C" __global__ void __launch_bounds__(THREADS, STATS_CTAS) stats(const __grid_constant__ Params p) {
  wait_for_previous();
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.flag = 0;  // `finish` and `write` raise it
  const u32 values = static_cast<u32>(p.B) * p.H * p.value_chunks;
  if (blockIdx.x < values) {
#if PRECISE
    value_check(p, blockIdx.x);
#else
    value_stats(p, blockIdx.x);
#endif
  } else {
    key_stats(p, blockIdx.x - values);
  }
}

extern "C" __global__ void __launch_bounds__(FINISH_THREADS) finish(const __grid_constant__ Params p) {
  wait_for_previous();
  const u32 bh = blockIdx.x >> 1;
  if (blockIdx.x & 1)
    finish_value(p, bh);
  else
    finish_key(p, bh);
}

extern "C" __global__ void __launch_bounds__(THREADS, WRITE_CTAS) write(const __grid_constant__ Params p) {
  wait_for_previous();
  const u32 batch_heads = p.B * p.H;
  const u32 keys = batch_heads * ceil_div(p.S_kv_pad, WRITE_ROWS);
  u32 cta = blockIdx.x;
  if (cta < keys) {
    write_key(p, keys - 1 - cta);  // backwards: what `stats` read last is still in L2
    return;
  }
  cta -= keys;
#if PRECISE
  write_query(p, cta);
#else
  const u32 values = batch_heads * ceil_div(p.NB, VALUE_BLOCKS);
  const u32 queries = batch_heads * ceil_div(p.S_q_pad, WRITE_ROWS);
  if (cta < values) {
    write_value(p, cta);
    return;
  }
  cta -= values;
  if (cta < queries)
    write_query(p, cta);
  else
    write_means(p, cta - queries);
#endif
}
