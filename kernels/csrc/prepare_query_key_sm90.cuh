// Preparation of q and k: rotated, keys without their mean, as INT8. A row of q has a scale of its own; so has a head of k or, if
// PRECISE, each of its blocks.
#pragma once
#include "prepare_params_sm90.cuh"
#include "rotation_sm90.cuh"

// Codes per 256 units: below 0.16 a score needs more bits than the fast kernel has; the precise one takes any.
constexpr float Q_SCALE_MIN = PRECISE ? 0x1p-10f : 0.16f;
constexpr float Q_SCALE_MAX = 128.f;
constexpr float K_SCALE_MIN = 0x1p-10f;  // of a block, relative to the head's; a block of zeros needs one, too

constexpr int ROWS_PER_STEP = 16 * WARPS;  // of write_query and write_key

// ---- q ------------------------------------------------------------------------------------------------------------------------

struct QueryScale {
  float codes;       // 1/8 octaves per 256 units of q8 . k8, a half
  float multiplier;  // from the rotated row to its INT8 codes
};

// `largest` is the largest magnitude of the rotated row, score_scale * (rotated q . k) a score in codes, key_scale the value of 256
// units of k8. Rounded up, so that no code passes 127. Beyond the cap a row keeps its direction at a smaller length: its scores are
// 4096 octaves apart all the same.
DEVICE QueryScale query_scale(float largest, bool real, float score_scale, float key_scale) {
  const float wanted = real ? largest * score_scale / LARGEST_CODE * key_scale : 0.f;
  const float codes = half_to_float(float_to_half_rounded_up(fminf(fmaxf(wanted, Q_SCALE_MIN), Q_SCALE_MAX)));
  return {codes, wanted > Q_SCALE_MAX ? LARGEST_CODE / largest : score_scale * key_scale / codes};
}

// One CTA: WRITE_ROWS rows of one head, a warp 16 at a time.
DEVICE void write_query(const Params& p, u32 cta) {
  const int quad = quad_id();
  const u32 lane = quad_lane();
  const Part part = part_of_block(cta, ceil_div(p.S_q_pad, WRITE_ROWS), p.B * p.H, p.q_heads_first);
  const int last = p.S_q - 1, end = min(static_cast<int>(part.index + 1) * WRITE_ROWS, p.S_q_pad);
  const u16* q = head_of_q(p, part.bh) + 8 * lane;
  const float key_scale = 256.f * p.k_scale[part.bh], score_scale = p.score_scale * INV_SQRT_D;
  const u32 signs = row_signs();
  RowTile tile;
  auto fetch = [&](int row) {  // past the end the last row
    load_tile(tile, q + static_cast<i64>(min(row, last)) * p.q_s, q + static_cast<i64>(min(row + 8, last)) * p.q_s);
  };
  int first = part.index * WRITE_ROWS + warp_id() * 16 + quad;  // the thread's rows are this and + 8
  if (first - quad < end) fetch(first);
#pragma unroll 1
  for (; first - quad < end; first += ROWS_PER_STEP) {
    RotatedRows x;
    multiply_signs(x, tile, signs);
    if (first - quad + ROWS_PER_STEP < end) fetch(first + ROWS_PER_STEP);
    butterflies(x);
    raise_flag_unless(is_finite(x[0][0]) && is_finite(x[0][2]), p);  // every input is in every sum
    const float largest[2] = {largest_of_row(x, 0), largest_of_row(x, 1)};
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int token = first + 8 * r;
      const bool real = token <= last;
      const QueryScale scale = query_scale(largest[r], real, score_scale, key_scale);
      const u32 row = part.bh * p.S_q_pad + token;  // below 2^31, the host checks
      store_codes(p.q8 + static_cast<u64>(row) * 32 + 2 * lane, real, x, r, scale.multiplier);
      if (lane == 0) p.q_scale[row] = scale.codes;
    }
  }
}

// ---- k ------------------------------------------------------------------------------------------------------------------------

// `mean` stands at channel 8 * quad_lane.
DEVICE void subtract_mean(RotatedRows& x, const float* mean) {
#pragma unroll
  for (int piece = 0; piece < 8; piece++) {
    const float4 m = load_as<float4>(mean + 32 * (piece / 2) + 4 * (piece % 2));
    float(&y)[8] = x[piece];
    y[0] -= m.x;
    y[1] -= m.y;
    y[2] -= m.x;
    y[3] -= m.y;
    y[4] -= m.z;
    y[5] -= m.w;
    y[6] -= m.z;
    y[7] -= m.w;
  }
}

// What one CTA of write_key reads: WRITE_ROWS rows of one head, past the end the last one.
struct KeyRows {
  Part part;
  int last, end;     // the last real row of the head; behind the last of the CTA
  const u16* k;      // at the thread's channels, like `mean`
  const int* order;  // or null
  const float* mean;
};

DEVICE KeyRows key_rows(const Params& p, u32 cta, u32 lane) {
  const Part part = part_of_block(cta, ceil_div(p.S_kv_pad, WRITE_ROWS), p.B * p.H, p.gather_heads_first);
  return {part,
          p.S_kv - 1,
          min(static_cast<int>(part.index + 1) * WRITE_ROWS, p.S_kv_pad),
          head_of_k(p, part.bh) + 8 * lane,
          order_of(p, part.bh),
          p.key_mean + part.bh * HEAD_DIM + 8 * lane};
}

// The thread's rows of k8, `first` and `first` + 8; those behind `last` are padding.
DEVICE void store_key_codes(const Params& p, u32 bh, int first, int last, const RotatedRows& x, float multiplier) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const u32 row = bh * p.S_kv_pad + first + 8 * r;
    store_codes(p.k8 + static_cast<u64>(row) * 32 + 2 * quad_lane(), first + 8 * r <= last, x, r, multiplier);
  }
}

#if PRECISE
// Raises `largest` to the largest magnitude of the thread's part of two rows.
DEVICE void update_largest(float& largest, const RotatedRows& x) {
#pragma unroll
  for (int piece = 0; piece < 8; piece++) {
#pragma unroll
    for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(x[piece][i]));
  }
}

DEVICE float largest_of_cta(float x) {
  __shared__ float of_warp[WARPS];
  x = warp_max(x);
  __syncthreads();  // everybody has read what the call before left
  if (lane_id() == 0) of_warp[warp_id()] = x;
  __syncthreads();
  return fmaxf(fmaxf(of_warp[0], of_warp[1]), fmaxf(of_warp[2], of_warp[3]));
}

// One CTA: WRITE_ROWS rows of one head, a warp 16 at a time. Two passes over each block, the second from L2: its scale is known only
// after the first.
DEVICE void write_key(const Params& p, u32 cta) {
  const int quad = quad_id();
  const KeyRows rows = key_rows(p, cta, quad_lane());
  const float head_scale = p.k_scale[rows.part.bh];
  const u32 signs = row_signs();
  auto load_rotated = [&](RotatedRows& x, int first) {  // rows `first` and `first` + 8; past the end the last one
    int source_0 = min(first, rows.last), source_1 = min(first + 8, rows.last);
    if (rows.order) {
      source_0 = rows.order[source_0];
      source_1 = rows.order[source_1];
    }
    RowTile tile;
    load_tile(tile, rows.k + static_cast<i64>(source_0) * p.k_s, rows.k + static_cast<i64>(source_1) * p.k_s);
    multiply_signs(x, tile, signs);
    butterflies(x);
    subtract_mean(x, rows.mean);
  };
#pragma unroll 1
  for (int block = rows.part.index * (WRITE_ROWS / BLOCK); block * BLOCK < rows.end; block++) {
    const int begin = block * BLOCK + warp_id() * 16 + quad;
    float largest = 0.f;
#pragma unroll 1
    for (int first = begin; first < (block + 1) * BLOCK; first += ROWS_PER_STEP) {
      RotatedRows x;
      load_rotated(x, first);
      update_largest(largest, x);
    }
    const float scale = fmaxf(largest_of_cta(largest) * INV_SQRT_D / LARGEST_CODE, K_SCALE_MIN * head_scale);
    if (threadIdx.x == 0) p.k_block_scale[rows.part.bh * p.NB + block] = scale / head_scale;
#pragma unroll 1
    for (int first = begin; first < (block + 1) * BLOCK; first += ROWS_PER_STEP) {
      RotatedRows x;
      load_rotated(x, first);
      store_key_codes(p, rows.part.bh, first, rows.last, x, INV_SQRT_D / scale);
    }
  }
}
#else
// One CTA: WRITE_ROWS rows of one head, a warp 16 at a time. It reads two steps ahead which rows they are, one step ahead the rows.
DEVICE void write_key(const Params& p, u32 cta) {
  const int quad = quad_id();
  const KeyRows rows = key_rows(p, cta, quad_lane());
  const float multiplier = INV_SQRT_D / p.k_scale[rows.part.bh];
  const u32 signs = row_signs();
  int source_0, source_1;
  auto find_sources = [&](int first) {  // of rows `first` and `first` + 8; past the end the last one
    source_0 = min(first, rows.last);
    source_1 = min(first + 8, rows.last);
    if (rows.order) {
      source_0 = rows.order[source_0];
      source_1 = rows.order[source_1];
    }
  };
  RowTile tile;
  auto fetch = [&]() {
    load_tile(tile, rows.k + static_cast<i64>(source_0) * p.k_s, rows.k + static_cast<i64>(source_1) * p.k_s);
  };
  int first = rows.part.index * WRITE_ROWS + warp_id() * 16 + quad;
  find_sources(first);
  if (first - quad < rows.end) fetch();
  find_sources(first + ROWS_PER_STEP);
#pragma unroll 1
  for (; first - quad < rows.end; first += ROWS_PER_STEP) {
    RotatedRows x;
    multiply_signs(x, tile, signs);
    if (first - quad + ROWS_PER_STEP < rows.end) fetch();
    find_sources(first + 2 * ROWS_PER_STEP);
    butterflies(x);
    subtract_mean(x, rows.mean);
    store_key_codes(p, rows.part.bh, first, rows.last, x, multiplier);
  }
}
#endif

// ---- statistics of the rotated keys -------------------------------------------------------------------------------------------

// Here the signs are the A operand and the tokens the columns, so that a thread holds 16 channels: 48 running values instead of 96.
// Channel in row `row` of the 16 x 8 accumulator of `piece`, 2 * load + bit 2.
DEVICE int channel_of_row(u32 row, int piece) { return (piece >> 1) << 5 | (row >> 2) << 3 | (piece & 1) << 2 | (row & 3); }

// x[piece], 16 x 8: signs (their A fragment) times the tokens of a tile.
DEVICE void multiply_signs_by_tokens(float (&x)[8][4], const u32 (&signs)[4], const u32 (&tile)[4][4]) {
#pragma unroll
  for (int load = 0; load < 4; load++) {
    const u32(&pairs)[4] = tile[load];
    mma_m16n8k16(x[2 * load], signs[0], signs[1], signs[2], signs[3], pairs[0], pairs[1]);
    mma_m16n8k16(x[2 * load + 1], signs[0], signs[1], signs[2], signs[3], pairs[2], pairs[3]);
  }
}

// Running statistics of the thread's channels: [piece][r] is of channel_of_row(quad_id + 8 * r, piece).
struct ChannelStats {
  float max[8][2], min[8][2], sum[8][2];

  DEVICE void clear() {
#pragma unroll
    for (int piece = 0; piece < 8; piece++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        sum[piece][r] = 0.f;
        min[piece][r] = infinity();
        max[piece][r] = -infinity();
      }
    }
  }

  // x[piece][2 * r + n] is token n of two.
  DEVICE void add_two(const float (&x)[8][4]) {
#pragma unroll
    for (int piece = 0; piece < 8; piece++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float a = x[piece][2 * r], b = x[piece][2 * r + 1];
        sum[piece][r] += a + b;
        min[piece][r] = fminf(min[piece][r], fminf(a, b));
        max[piece][r] = fmaxf(max[piece][r], fmaxf(a, b));
      }
    }
  }

  DEVICE void add_one(const float (&x)[8][4], int n) {
#pragma unroll
    for (int piece = 0; piece < 8; piece++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float y = x[piece][2 * r + n];
        sum[piece][r] += y;
        min[piece][r] = fminf(min[piece][r], y);
        max[piece][r] = fmaxf(max[piece][r], y);
      }
    }
  }

  // Over the quad, then to shared memory.
  DEVICE void store(float (&of_warp)[3][HEAD_DIM]) {
#pragma unroll
    for (int piece = 0; piece < 8; piece++) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
          sum[piece][r] += __shfl_xor_sync(~0u, sum[piece][r], distance);
          min[piece][r] = fminf(min[piece][r], __shfl_xor_sync(~0u, min[piece][r], distance));
          max[piece][r] = fmaxf(max[piece][r], __shfl_xor_sync(~0u, max[piece][r], distance));
        }
        if (quad_lane() == 0) {
          const int channel = channel_of_row(quad_id() + 8 * r, piece);
          of_warp[0][channel] = sum[piece][r];
          of_warp[1][channel] = min[piece][r];
          of_warp[2][channel] = max[piece][r];
        }
      }
    }
  }
};

// One CTA: KEY_CHUNK tokens of one head, a warp 16 at a time: sum, minimum and maximum of each rotated channel. The largest
// |rotated (k - mean)| follows from them, because rounding is monotonic: max(x) - mean is the maximum of x - mean.
DEVICE void key_stats(const Params& p, u32 cta) {
  __shared__ float of_warp[WARPS][3][HEAD_DIM];
  const u32 warp = warp_id(), quad = quad_id(), lane = quad_lane();
  const Part part = part_of_block(cta, p.key_chunks, p.B * p.H, p.k_heads_first);
  const u32 signs[4] = {sign_pair(quad, 4 * lane), sign_pair(quad + 8, 4 * lane), sign_pair(quad, 4 * lane + 2),
                        sign_pair(quad + 8, 4 * lane + 2)};
  const int begin = part.index * KEY_CHUNK, end = min(begin + KEY_CHUNK, p.S_kv), last = p.S_kv - 1;
  const u16* k = head_of_k(p, part.bh) + 8 * lane;
  ChannelStats stats;
  stats.clear();
  u32 tiles[2][4][4];  // two tiles of 8 tokens: the products consume one, then its successor is loaded into its place
  auto fetch = [&](u32 (&tile)[4][4], int first) {
#pragma unroll
    for (int load = 0; load < 4; load++)
      load_channels(tile[load], k + static_cast<i64>(min(first + static_cast<int>(quad), last)) * p.k_s + 32 * load);
  };
  int first = begin + 16 * warp;
  if (first < end) {
    fetch(tiles[0], first);
    fetch(tiles[1], first + 8);
  }
  for (; first < end; first += 16 * WARPS) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float x[8][4];
      multiply_signs_by_tokens(x, signs, tiles[i]);
      if (first + 16 * WARPS < end) fetch(tiles[i], first + 16 * WARPS + 8 * i);
      butterflies(x);
      const int token = first + 8 * i + 2 * lane;
      if (first + 16 <= end) {
        stats.add_two(x);
      } else {
#pragma unroll
        for (int n = 0; n < 2; n++)
          if (token + n < end) stats.add_one(x, n);
      }
    }
  }
  stats.store(of_warp[warp]);
  __syncthreads();
  const int channel = threadIdx.x;
  float* partial = p.key_partial + (static_cast<u64>(part.bh) * p.key_chunks + part.index) * (3 * HEAD_DIM) + channel;
  auto of = [&](int warp, int kind) { return of_warp[warp][kind][channel]; };
  partial[0] = (of(0, 0) + of(1, 0)) + (of(2, 0) + of(3, 0));
  partial[HEAD_DIM] = fminf(fminf(of(0, 1), of(1, 1)), fminf(of(2, 1), of(3, 1)));
  partial[2 * HEAD_DIM] = fmaxf(fmaxf(of(0, 2), of(1, 2)), fmaxf(of(2, 2), of(3, 2)));
}

// One CTA of FINISH_THREADS: mean and scale of one head's keys from the partial statistics, in a fixed order.
DEVICE void finish_key(const Params& p, u32 bh) {
  __shared__ float sums[FINISH_PARTS][HEAD_DIM], minima[FINISH_PARTS][HEAD_DIM], maxima[FINISH_PARTS][HEAD_DIM];
  const int channel = threadIdx.x % HEAD_DIM, part = threadIdx.x / HEAD_DIM;
  float max = -infinity(), min = infinity(), sum = 0.f;
  const float* partials = p.key_partial + static_cast<u64>(bh) * p.key_chunks * (3 * HEAD_DIM) + channel;
#pragma unroll 4
  for (int i = part; i < p.key_chunks; i += FINISH_PARTS) {
    const float* partial = partials + static_cast<u64>(i) * (3 * HEAD_DIM);
    sum += partial[0];
    min = fminf(min, partial[HEAD_DIM]);
    max = fmaxf(max, partial[2 * HEAD_DIM]);
  }
  sums[part][channel] = sum;
  minima[part][channel] = min;
  maxima[part][channel] = max;
  __syncthreads();
  if (part == 0) {
#pragma unroll
    for (int i = 1; i < FINISH_PARTS; i++) {
      sum += sums[i][channel];
      min = fminf(min, minima[i][channel]);
      max = fmaxf(max, maxima[i][channel]);
    }
    raise_flag_unless(is_finite(sum), p);
    const float mean = sum / static_cast<float>(p.S_kv);
    p.key_mean[bh * HEAD_DIM + channel] = mean;
    sums[0][channel] = fmaxf(max - mean, mean - min);  // largest magnitude of the channel
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const float of_head =
        warp_max(fmaxf(fmaxf(sums[0][channel], sums[0][channel + 32]), fmaxf(sums[0][channel + 64], sums[0][channel + 96])));
    if (channel == 0) p.k_scale[bh] = fmaxf(of_head * INV_SQRT_D / LARGEST_CODE, 1e-10f);
  }
}
