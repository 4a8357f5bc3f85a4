// Preparation of v: what is left of each block without its mean, as E4M3 with a scale per channel, transposed; and the means.
// If PRECISE, the attention kernel reads v itself, and only what it cannot add up is looked for.
#pragma once
#include "prepare_params_sm90.cuh"

constexpr u32 PAIR_INFINITIES = INPUT_FP16 ? 0x7c007c00 : 0x7f807f80;  // of a pair; as bits, all of the exponents

constexpr float LARGEST_RESIDUAL = 448.f;  // in units of v_scale: the largest E4M3
constexpr float LARGEST_MEAN = 60000.f;    // a half, with room for rounding

// One block of v, whose head starts at `v`: warp w has rows 32 w.. of it, its halves 16 rows each, a lane 8 channels of those.
// Past the end the last row.
DEVICE void load_value_rows(u32 (&rows)[16][4], const Params& p, u32 bh, const u16* v, int block) {
  const int lane = lane_id(), half = lane >> 4, chunk = lane & 15;
  int source = min(static_cast<int>(block * BLOCK + 32 * warp_id()) + lane, p.S_kv - 1);
  if (p.permutation) source = p.permutation[static_cast<i64>(bh) * p.S_kv + source];
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const int token = __shfl_sync(~0u, source, half * 16 + i);
    load_channels(rows[i], v + static_cast<i64>(token) * p.v_s + 8 * chunk);
  }
}

#if PRECISE
// Added to the exponents of a pair, carries into the signs of what the attention kernel cannot add up: half NaN and infinity, bfloat16
// from 2^81 on. 2^31 keys of probability 2^15, the largest there, times less than that stay in FP32.
constexpr u32 PAIR_VALUE_LIMIT_CARRIES = INPUT_FP16 ? 0x04000400 : 0x18001800;

// One CTA: VALUE_CHUNK blocks of one head. Looks for NaN, infinity and, in bfloat16, values too large.
DEVICE void value_check(const Params& p, u32 cta) {
  const Part part = part_of_block(cta, p.value_chunks, p.B * p.H, p.gather_heads_first);
  const u16* v = head_of_v(p, part.bh);
  const int first = part.index * VALUE_CHUNK, blocks = min(VALUE_CHUNK, p.NB - first);
  u32 carry = 0;
  for (int i = 0; i < blocks; i++) {
    u32 rows[16][4];
    load_value_rows(rows, p, part.bh, v, first + i);
#pragma unroll
    for (int row = 0; row < 16; row++) {
#pragma unroll
      for (int e = 0; e < 4; e++) carry |= (rows[row][e] & PAIR_INFINITIES) + PAIR_VALUE_LIMIT_CARRIES;
    }
  }
  const bool bad = __syncthreads_or(carry & PAIR_SIGNS);
  if (threadIdx.x == 0) p.value_partial[static_cast<u64>(part.bh) * p.value_chunks + part.index] = bad ? infinity() : 0.f;
}

// One CTA of FINISH_THREADS, one head.
DEVICE void finish_value(const Params& p, u32 bh) {
  for (int i = threadIdx.x; i < p.value_chunks; i += FINISH_THREADS)
    raise_flag_unless(is_finite(p.value_partial[static_cast<u64>(bh) * p.value_chunks + i]), p);
}
#else

// ---- statistics ---------------------------------------------------------------------------------------------------------------

DEVICE u32 input_min(u32 a, u32 b) {
  u32 y;
  asm("min." INPUT_TYPE "x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

DEVICE u32 input_max(u32 a, u32 b) {
  u32 y;
  asm("max." INPUT_TYPE "x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// Sums and extremes of 8 channels.
struct RowStats {
  float sum[8];
  u32 min[4], max[4];

  // The rows of half a warp, as load_value_rows gives them; `real` of the block's exist, those behind them repeat the last one.
  DEVICE void of_rows(const u32 (&rows)[16][4], int warp, int half, int real) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      sum[2 * e] = sum[2 * e + 1] = 0.f;
      min[e] = PAIR_INFINITIES;
      max[e] = PAIR_INFINITIES | PAIR_SIGNS;
    }
#pragma unroll
    for (int row = 0; row < 16; row++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        min[e] = input_min(min[e], rows[row][e]);
        max[e] = input_max(max[e], rows[row][e]);
        if (real == BLOCK || 32 * warp + 16 * half + row < real) {
          sum[2 * e] += input_low(rows[row][e]);
          sum[2 * e + 1] += input_high(rows[row][e]);
        }
      }
    }
  }

  // Of both halves of the warp together.
  DEVICE void fold_halves() {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      sum[2 * e] += __shfl_xor_sync(~0u, sum[2 * e], 16);
      sum[2 * e + 1] += __shfl_xor_sync(~0u, sum[2 * e + 1], 16);
      min[e] = input_min(min[e], __shfl_xor_sync(~0u, min[e], 16));
      max[e] = input_max(max[e], __shfl_xor_sync(~0u, max[e], 16));
    }
  }
};

// Of one channel.
DEVICE float sum_over_warps(const float (&x)[WARPS][HEAD_DIM], int channel) {
  return (x[0][channel] + x[1][channel]) + (x[2][channel] + x[3][channel]);
}

// Of one pair of channels.
DEVICE u32 min_over_warps(const u32 (&x)[WARPS][HEAD_DIM / 2], int pair) {
  return input_min(input_min(x[0][pair], x[1][pair]), input_min(x[2][pair], x[3][pair]));
}

DEVICE u32 max_over_warps(const u32 (&x)[WARPS][HEAD_DIM / 2], int pair) {
  return input_max(input_max(x[0][pair], x[1][pair]), input_max(x[2][pair], x[3][pair]));
}

// One CTA: VALUE_CHUNK blocks of one head, in the end a thread per channel: block means, largest |v - mean| and |mean|.
DEVICE void value_stats(const Params& p, u32 cta) {
  // Two buffers: the writes of block i + 2 come after the barrier of i + 1, behind all reads of i.
  __shared__ float sums[2][WARPS][HEAD_DIM];
  __shared__ u32 minima[2][WARPS][HEAD_DIM / 2], maxima[2][WARPS][HEAD_DIM / 2];
  const int warp = warp_id(), half = lane_id() >> 4, chunk = lane_id() & 15, channel = threadIdx.x;
  const Part part = part_of_block(cta, p.value_chunks, p.B * p.H, p.gather_heads_first);
  const u16* v = head_of_v(p, part.bh);
  float largest = 0.f, largest_mean = 0.f;
  bool bad = false;
  const int first = part.index * VALUE_CHUNK, blocks = min(VALUE_CHUNK, p.NB - first);
  for (int i = 0; i < blocks; i++) {
    const int block = first + i, real = min(BLOCK, p.S_kv - block * BLOCK), buffer = i & 1;
    u32 rows[16][4];
    load_value_rows(rows, p, part.bh, v, block);
    RowStats stats;
    stats.of_rows(rows, warp, half, real);
    stats.fold_halves();
    if (half == 0) {
      const float(&sum)[8] = stats.sum;
      const u32(&min)[4] = stats.min, (&max)[4] = stats.max;
      *reinterpret_cast<float4*>(&sums[buffer][warp][8 * chunk]) = make_float4(sum[0], sum[1], sum[2], sum[3]);
      *reinterpret_cast<float4*>(&sums[buffer][warp][8 * chunk + 4]) = make_float4(sum[4], sum[5], sum[6], sum[7]);
      *reinterpret_cast<uint4*>(&minima[buffer][warp][4 * chunk]) = make_uint4(min[0], min[1], min[2], min[3]);
      *reinterpret_cast<uint4*>(&maxima[buffer][warp][4 * chunk]) = make_uint4(max[0], max[1], max[2], max[3]);
    }
    __syncthreads();
    const float sum = sum_over_warps(sums[buffer], channel);
    const float mean = p.demean ? sum / static_cast<float>(real) : 0.f;
    const u32 low_pair = min_over_warps(minima[buffer], channel >> 1), high_pair = max_over_warps(maxima[buffer], channel >> 1);
    const float lowest = channel & 1 ? input_high(low_pair) : input_low(low_pair);
    const float highest = channel & 1 ? input_high(high_pair) : input_low(high_pair);
    bad |= !is_finite(sum);
    largest = fmaxf(largest, fmaxf(highest - mean, mean - lowest));
    largest_mean = fmaxf(largest_mean, fabsf(mean));
    p.block_mean[(static_cast<u64>(part.bh) * p.NB + block) * HEAD_DIM + channel] = mean;
  }
  float* partial = p.value_partial + (static_cast<u64>(part.bh) * p.value_chunks + part.index) * (2 * HEAD_DIM) + channel;
  partial[0] = bad ? infinity() : largest;
  partial[HEAD_DIM] = largest_mean;
}

// One CTA of FINISH_THREADS: v_scale of one head, such that E4M3 holds the residuals and half the means.
DEVICE void finish_value(const Params& p, u32 bh) {
  __shared__ float values[FINISH_PARTS][HEAD_DIM], means[FINISH_PARTS][HEAD_DIM];
  const int channel = threadIdx.x % HEAD_DIM, part = threadIdx.x / HEAD_DIM;
  float largest = 0.f, largest_mean = 0.f;
  const float* partials = p.value_partial + static_cast<u64>(bh) * p.value_chunks * (2 * HEAD_DIM) + channel;
#pragma unroll 4
  for (int i = part; i < p.value_chunks; i += FINISH_PARTS) {
    const u64 row = static_cast<u64>(i) * (2 * HEAD_DIM);
    largest = fmaxf(largest, partials[row]);
    largest_mean = fmaxf(largest_mean, partials[row + HEAD_DIM]);
  }
  values[part][channel] = largest;
  means[part][channel] = largest_mean;
  __syncthreads();
  if (part == 0) {
#pragma unroll
    for (int i = 1; i < FINISH_PARTS; i++) {
      largest = fmaxf(largest, values[i][channel]);
      largest_mean = fmaxf(largest_mean, means[i][channel]);
    }
    raise_flag_unless(is_finite(largest), p);
    const float scale = fmaxf(largest / LARGEST_RESIDUAL, largest_mean / LARGEST_MEAN);
    p.v_scale[bh * HEAD_DIM + channel] = scale == 0.f ? 1.f : fmaxf(scale, 1e-30f);
  }
}

// ---- operands -----------------------------------------------------------------------------------------------------------------

// Block number at a slot of a group of 16: the order in which the attention kernel's A fragment holds its row sums.
DEVICE int block_at_slot(int slot) { return 4 * ((slot & 1) + 2 * (slot >> 3)) + ((slot >> 1) & 3); }

// One CTA: MEANS_GROUP blocks of one head, a thread per channel.
DEVICE void write_means(const Params& p, u32 cta) {
  static_assert(MEANS_GROUP == 1 << 4, "groups of a head");
  const u32 groups = p.NB16 >> 4, bh = cta / groups, group = cta - bh * groups, channel = threadIdx.x;
  const float inverse = 1.f / p.v_scale[bh * HEAD_DIM + channel];
  u32 pairs[8];
#pragma unroll
  for (int slot = 0; slot < MEANS_GROUP; slot++) {
    const int block = MEANS_GROUP * group + block_at_slot(slot);
    const u32 mean =
        block < p.NB ? float_to_half(p.block_mean[(static_cast<u64>(bh) * p.NB + block) * HEAD_DIM + channel] * inverse) : 0;
    pairs[slot >> 1] = slot & 1 ? pairs[slot >> 1] | mean << 16 : mean;
  }
  uint4* out = reinterpret_cast<uint4*>(p.means) + (static_cast<u64>(bh * HEAD_DIM + channel) * p.NB16 + MEANS_GROUP * group) / 8;
  out[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  out[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

// The mean as write_means stores it, in units of v_scale.
DEVICE float stored_mean(float mean, float inverse) { return half_to_float(float_to_half(mean * inverse)); }

// E4M3 residuals of value(key) of 16 keys of one channel, `real` of which exist, in units of v_scale as `mean` is; inverse = 1 / v_scale.
// Position 4 c + i holds key (2 c, 2 c + 1, 8 + 2 c, 9 + 2 c)[i].
template <class Value>
DEVICE uint4 sixteen_residuals(Value value, float inverse, float mean, int real) {
  u32 pairs[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float low = value(2 * i), high = value(2 * i + 1);
    low = fmaf(low, inverse, -mean);
    high = fmaf(high, inverse, -mean);
    if (real < 16) {
      if (2 * i >= real) low = 0.f;
      if (2 * i + 1 >= real) high = 0.f;
    }
    pairs[i] = pack_e4m3(low, high);
  }
  auto four = [&](int i) { return __byte_perm(pairs[i], pairs[i + 4], 0x5410); };
  return make_uint4(four(0), four(1), four(2), four(3));
}

// One CTA: VALUE_BLOCKS blocks of one head. Of each, warp w has keys 32 w.., a lane 4 channels of all of them.
DEVICE void write_value(const Params& p, u32 cta) {
  // [channel][16 keys], column XOR (channel >> 2) & 7; two buffers, so that one barrier per block is enough.
  __shared__ uint4 transposed[2][HEAD_DIM][8];
  const int warp = warp_id(), lane = lane_id();
  const Part part = part_of_block(cta, ceil_div(p.NB, VALUE_BLOCKS), p.B * p.H, p.gather_heads_first);
  const u16* v = head_of_v(p, part.bh) + 4 * lane;
  const int* order = order_of(p, part.bh);
  const int first = part.index * VALUE_BLOCKS, stop = min(first + VALUE_BLOCKS, p.NB);
  const float4 scale = load_as<float4>(p.v_scale + part.bh * HEAD_DIM + 4 * lane);
  const float inverse[4] = {1.f / scale.x, 1.f / scale.y, 1.f / scale.z, 1.f / scale.w};

  auto source_of = [&](int block) {
    const int key = min(block * BLOCK + 32 * warp + lane, p.S_kv - 1);
    return order ? order[key] : key;
  };
  auto fetch = [&](u32 (&rows)[16][2], int source, int half) {
#pragma unroll
    for (int i = 0; i < 16; i++)
      load_channels(rows[i], v + static_cast<i64>(__shfl_sync(~0u, source, half * 16 + i)) * p.v_s);
  };
  auto convert = [&](const u32 (&rows)[16][2], const float (&mean)[4], int block, int half) {
    const int real = p.S_kv - block * BLOCK - 32 * warp - 16 * half;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      auto value = [&](int key) { return e & 1 ? input_high(rows[key][e >> 1]) : input_low(rows[key][e >> 1]); };
      transposed[block & 1][4 * lane + e][(2 * warp + half) ^ (lane & 7)] = sixteen_residuals(value, inverse[e], mean[e], real);
    }
  };
  auto store = [&](int block) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int channel = 16 * i + (threadIdx.x >> 3), column = threadIdx.x & 7;
      u8* row = reinterpret_cast<u8*>(p.v8) + (static_cast<u64>(part.bh) * HEAD_DIM + channel) * p.S_kv_pad;
      store_as(row + block * BLOCK + 16 * column, transposed[block & 1][channel][column ^ ((channel >> 2) & 7)]);
    }
  };

  u32 rows[2][16][2];  // of both halves of a block: one is converted, then its successor is loaded into its place
  int source = source_of(first);
  fetch(rows[0], source, 0);
  fetch(rows[1], source, 1);
  source = source_of(first + 1);
  for (int block = first; block < stop; block++) {
    const float4 m = load_as<float4>(p.block_mean + (static_cast<u64>(part.bh) * p.NB + block) * HEAD_DIM + 4 * lane);
    const float mean[4] = {stored_mean(m.x, inverse[0]), stored_mean(m.y, inverse[1]), stored_mean(m.z, inverse[2]),
                           stored_mean(m.w, inverse[3])};
    const bool more = block + 1 < stop;
    convert(rows[0], mean, block, 0);
    if (more) fetch(rows[0], source, 0);
    convert(rows[1], mean, block, 1);
    if (more) fetch(rows[1], source, 1);
    source = source_of(block + 2);
    __syncthreads();
    store(block);
  }
}
#endif
