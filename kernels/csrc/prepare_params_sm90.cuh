// What the three launches of prepare_sm90.cu are told, and the numbers that they share.
#pragma once
#include "strided_sm90.cuh"

#ifndef PRECISE
#define PRECISE 0
#endif

constexpr int BLOCK = 128;         // tokens of a block: of a mean, of a key scale, of a tile of the attention kernel
constexpr int KEY_CHUNK = 512;     // key tokens per CTA of key_stats
constexpr int VALUE_CHUNK = 8;     // blocks per CTA of value_stats and value_check
constexpr int WRITE_ROWS = 256;    // rows per CTA of write_query and write_key
constexpr int VALUE_BLOCKS = 4;    // blocks per CTA of write_value
constexpr int MEANS_GROUP = 16;    // blocks per CTA of write_means, and per mean product of the attention kernel
constexpr int THREADS = 128;       // of `stats` and `write`
constexpr int WARPS = THREADS / 32;
constexpr int FINISH_THREADS = 1024;
constexpr int FINISH_PARTS = FINISH_THREADS / HEAD_DIM;  // threads per channel

constexpr float INV_SQRT_D = 0.08838834764831845f;  // of the rotation, folded into the scales

constexpr int FLAG_NOT_FINITE = 1;

// Shapes in brackets: BH = B * H, D = HEAD_DIM.
struct Params {
  const u16 *q, *k, *v;                             // [B, H, S, D], 16-bit elements
  i64 q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s;  // strides in elements
  const int* permutation;                           // [BH, S_kv], the token at each position, or null: as they come
  u32* q8;                                          // [BH, S_q_pad, D] INT8
  float* q_scale;                                   // [BH, S_q_pad]
  u32* k8;                                          // [BH, S_kv_pad, D] INT8
  float* k_scale;                                   // [BH]
  u32* v8;                                          // [BH, D, S_kv_pad] E4M3
  float* v_scale;                                   // [BH, D]
  u32* means;                                       // [BH, D, NB16] half
  int* flag;                                        // [1], FLAG_NOT_FINITE
  float* key_partial;                               // [BH, key_chunks, 3, D]: sum, min, max
  float* value_partial;                             // [BH, value_chunks, 2, D]; if PRECISE [BH, value_chunks], 0 or infinity
  float* key_mean;                                  // [BH, D], rotated, not normalized
  float* block_mean;                                // [BH, NB, D]; not if PRECISE
  float* k_block_scale;                             // [BH, NB], relative to k_scale; only if PRECISE
  int B, H, S_q, S_kv;
  int S_q_pad, S_kv_pad;                            // whole blocks
  int NB, NB16;                                     // blocks of keys; rounded up to whole groups of MEANS_GROUP
  int key_chunks, value_chunks;
  int q_heads_first, k_heads_first, gather_heads_first;  // see part_of_block
  int demean;                                       // 0: block means are taken as zero
  float score_scale;                                // 8 * log2(e) * softmax scale: in codes, 1/8 octave
};
static_assert(sizeof(Params) == 272, "quantize/cuda.py mirrors this structure");

DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

DEVICE const u16* head_of_q(const Params& p, u32 bh) { return head_start(p.q, p.q_b, p.q_h, bh, p.H); }
DEVICE const u16* head_of_k(const Params& p, u32 bh) { return head_start(p.k, p.k_b, p.k_h, bh, p.H); }
DEVICE const u16* head_of_v(const Params& p, u32 bh) { return head_start(p.v, p.v_b, p.v_h, bh, p.H); }

// The order of one head's keys and values, or null.
DEVICE const int* order_of(const Params& p, u32 bh) {
  return p.permutation ? p.permutation + static_cast<i64>(bh) * p.S_kv : nullptr;
}

DEVICE void raise_flag_unless(bool finite, const Params& p) {
  if (!finite) atomicOr(p.flag, FLAG_NOT_FINITE);
}

// ---- half ---------------------------------------------------------------------------------------------------------------------

DEVICE float half_to_float(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

DEVICE u16 float_to_half(float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

DEVICE u16 float_to_half_rounded_up(float x) {
  u16 y;
  asm("cvt.rp.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
