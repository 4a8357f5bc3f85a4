// 8-bit attention for Hopper (sm_90a): softmax(q k^T) v without mask, INT8 q and k, E4M3 probabilities and values.
//
// Semantics. Per (batch, head): v = v_scale * (residual + mean of its 128-token block), so
//     out[i] = sum_t p[i,t] v[t] / sum_t p[i,t] = v_scale * (sum_t p[i,t] residual[t] + sum_j r[i,j] mean[j]) / sum_j r[i,j]
// with r[i,j] the sum of the decoded p[i,t] over block j. A score enters as a code, 1/8 octave each; the code's byte, read as E4M3,
// is the probability (ExpCast): p = 2^((code - 56) / 8), up to 7 %. Keys past s_kv have probability exactly 0, whatever the
// operands hold there except NaN bytes in v8; query rows past s_q are never written.
//
// Blocks: attention_tiles_sm90.cuh; what each works on: attention_schedule_sm90.cuh. The consumers alternate on the tensor cores.
// q stays in registers: from shared memory it would be a third of the bytes that Q K^T reads, and power is what limits this kernel.
// The room for it is the flushed output's, which lies in shared memory and is touched every GROUP tiles only.
//
// Requires sm_90a, 384 threads, SHARED_BYTES of dynamic shared memory, and these tensor maps (x, y, z), zero outside:
//   q_map      q8    [BH, s_q, 128]  INT8          box 128 x 64,            128-byte swizzle
//   k_map      k8    [BH, s_kv, 128] INT8          box 128 x 128 / CLUSTER, 128-byte swizzle
//   v_map      v8    [BH, 128, keys] E4M3 bits     box 128 x 128 / CLUSTER, 128-byte swizzle
//   means_map  means [BH, 128, slots] half         box 16 x 128,            32-byte swizzle
// s_q and s_kv in the maps are the real lengths, so TMA itself zeroes the padding of q8 and k8.
//
// Layout that the kernel relies on (made by the preparation, see quantize/hopper.py):
//   v8 keys are permuted inside groups of 32 such that the score accumulators of a thread are its A fragment of P V: no shuffles.
//   means are permuted inside groups of 16 blocks such that the row sums of a thread are its A fragment of the mean product.
//
// Switches: -DMEANS=0 leaves the means out, -DEXPCAST=0 takes an exponential and a cast in place of ExpCast, -DOUT_HALF=1 writes
// half instead of bfloat16.
#ifndef MEANS
#define MEANS 1
#endif
#ifndef OUT_HALF
#define OUT_HALF 0
#endif
#ifndef EXPCAST
#define EXPCAST 1
#endif

#include "attention_combine_sm90.cuh"

constexpr int GROUP = 16;                 // tiles accumulated in the tensor cores between two flushes = slots of one mean product
constexpr int CONSUMERS = 256;
constexpr int SHARED_BYTES = 190 * 1024;  // attend/cuda.py reserves this

// Code of the running maximum. What lies 14.25 octaves below is code 0 and lost: with 100 and its 12.5 octaves, tens of thousands of
// small probabilities were (docs/hopper.md). The headroom up to 126 (1.5 octaves) decides how rarely a row needs a new maximum.
// Without ExpCast codes are only a scale of scores: they start 25 lower, where the probability, 2^-10.1, is rounded to zero.
constexpr int FIRST_CODE = EXPCAST ? 0 : -25;
constexpr float MAX_CODE = 114 - FIRST_CODE;
constexpr u32 LAST_CODE = 126 - FIRST_CODE;  // E4M3 448; 127 would be NaN
// Above so many tiles a row's first maximum stands lower, at 94: as it grows, few steps need a new one. Not where a few outliers of the
// first tile are the maximum (raise_maximum): it would hardly grow, and small probabilities were lost.
constexpr int SHORT_TILES = 32;
constexpr int ROOM_256THS = 45;  // of MAX_CODE, by which it stands lower
constexpr u32 OFFSET_SCORE_LIMIT = 0x03ff03ffu;  // 1023, twice: the largest subnormal half, above the largest code for any q_scale
constexpr int NO_MAX_YET = 20000;                // above every offset (at most 8065 + 869), and no sum with a score leaves 16 bits

// Start value of the score of a padding key, whose k8 row TMA has zeroed: -16384 units of 256. Every real score is at least -8065
// and every offset at most 8934, so its code is 0, and offset + score stays in 16 bits for the smallest offset, -8063, too.
constexpr u32 PADDING_SCORE = static_cast<u32>(-16384 * 256);
static_assert(-16384 + 8934 < 0 && -16384 - 8063 >= -32768, "a padding key has code 0");

constexpr int SUM_ROWS_BYTES = 8 * BLOCK_KV;  // eight more rows behind V, see fill_sum_rows
constexpr int V_BYTES = HEAD_DIM * BLOCK_KV + SUM_ROWS_BYTES;
constexpr int MEANS_BYTES = HEAD_DIM * GROUP * 2;

struct Smem {
  static constexpr int K = 0;
  static constexpr int V = K + STAGES * K_BYTES;
  static constexpr int MEAN = V + STAGES * V_BYTES;
  static constexpr int Q = MEAN + 2 * MEANS_BYTES;
  static constexpr int OUT = Q + Q_BYTES;
  static constexpr int BARRIERS = OUT + BLOCK_Q * HEAD_DIM * 2;
  static constexpr int BYTES = BARRIERS + 8 * (StageBarriers::COUNT + 5);
};
static_assert(Smem::BYTES + 1023 <= SHARED_BYTES, "tiles and barriers, and the way to an address that is a multiple of 1024");
static_assert(V_BYTES % 1024 == 0, "128-byte swizzle repeats every 1024 bytes");

struct Barriers : StageBarriers {
  DEVICE u32 means_full(int buffer) const { return base_smem + 8 * (COUNT + buffer); }
  DEVICE u32 means_empty(int buffer) const { return base_smem + 8 * (COUNT + 2 + buffer); }
  DEVICE u32 q_full() const { return base_smem + 8 * (COUNT + 4); }

  DEVICE void init() const {
    init_stages();
    for (int i = 0; i < 2; i++) {
      mbarrier_init(means_full(i), 1);
      mbarrier_init(means_empty(i), 2);
    }
    mbarrier_init(q_full(), 1);
    fence_mbarrier_init();
  }
};

static_assert(STAGES == 4, "row sums are collected once around the ring");

// Row sums come from the tensor cores: the eight rows behind V make P V give them in columns 128..135. Behind the tile that is
// number i of four, rows 2i and 2i + 1 are ones and the others zeros. So over four tiles the thread with lane % 4 == i collects the
// sum of tile i, which is where the A fragment of the mean product wants it.
DEVICE void fill_sum_rows(char* base) {
  for (int i = threadIdx.x; i < STAGES * SUM_ROWS_BYTES / 4; i += THREADS) {
    const int stage = i / (SUM_ROWS_BYTES / 4), word = i % (SUM_ROWS_BYTES / 4);
    const int tile_of_four = (stage + STAGES - 1) % STAGES;
    const int row_pair = word / (2 * BLOCK_KV / 4);
    u32* sum_rows = reinterpret_cast<u32*>(base + Smem::V + stage * V_BYTES + HEAD_DIM * BLOCK_KV);
    sum_rows[word] = row_pair == tile_of_four ? 0x38383838u : 0u;  // E4M3 1.0
  }
}

struct Maps {
  const TensorMap *q, *k, *v, *means;
};

// One thread. Loads q once, then all pairs of tiles of the item; its half of each goes to both blocks of the cluster.
DEVICE void produce(const Maps& maps, u32 shared_smem, Barriers barriers, const Item& item) {
  const u32 rank = cluster_rank();
  const u16 everyone = (1 << CLUSTER) - 1;
  const int tiles = item.tiles(), bh = item.bh;
  load_query_tile(shared_smem + Smem::Q, maps.q, item.q_tile, bh, barriers.q_full());

  const int place = item.first_tile % GROUP, groups = (place + tiles + GROUP - 1) / GROUP;
  int group = 0;
  auto load_means = [&]() {
    const int buffer = group & 1;
    mbarrier_wait(barriers.means_empty(buffer), ((group >> 1) & 1) ^ 1);
    mbarrier_expect_bytes(barriers.means_full(buffer), MEANS_BYTES);
    tma_load_3d(shared_smem + Smem::MEAN + buffer * MEANS_BYTES, maps.means, item.first_tile - place + group * GROUP, 0, bh,
                barriers.means_full(buffer));
    group++;
  };

  int stage = 0, parity = 1;
  for (int pair = 0; pair <= tiles; pair++) {
    mbarrier_wait(barriers.empty(stage), parity);
    mbarrier_expect_bytes(barriers.full(stage), (pair < tiles ? K_BYTES : 0) + (pair > 0 ? HEAD_DIM * BLOCK_KV : 0));
    if (pair < tiles)
      load_key_tile(shared_smem + Smem::K + stage * K_BYTES, maps.k, item.first_tile + pair, bh, rank, barriers.full(stage));
    if (pair > 0)
      tma_load_3d_multicast(shared_smem + Smem::V + stage * V_BYTES + rank * (HEAD_DIM * BLOCK_KV / CLUSTER), maps.v,
                            (item.first_tile + pair - 1) * BLOCK_KV, rank * (HEAD_DIM / CLUSTER), bh, barriers.full(stage), everyone);
    // In the middle of a group: late enough that the buffer is free again, early enough for the group's end.
    if (MEANS && (pair + place) % GROUP >= GROUP / 2 && group == (pair + place) / GROUP && group < groups) load_means();
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  if (MEANS && group < groups) load_means();
}

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

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
attention_fwd_kernel(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                     const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap means_map,
                     const float* __restrict__ q_scale_gmem,  // [BH, s_q_pad]
                     const float* __restrict__ v_scale_gmem,  // [BH, 128]
                     u16* __restrict__ out_gmem,              // [B, H, s_q, 128], strides in elements, last one 1, the others even
                     i64 out_stride_b, i64 out_stride_h, i64 out_stride_s, int s_q, int s_q_pad, int s_kv, int heads,
                     const __grid_constant__ TileSchedule schedule) {
  extern __shared__ char shared[];
  char* base = first_tile(shared);
  const u32 base_smem = smem_address(base);
  const Barriers barriers{base_smem + Smem::BARRIERS};
  const Item item(schedule, s_kv);
  const int tiles = item.tiles();

  if (threadIdx.x == 0) barriers.init();
  fill_sum_rows(base);
  fence_async_proxy();
  __syncthreads();
  cluster_sync();  // no block may signal a barrier of the other before it is initialized

  if (threadIdx.x < 128) {
    registers_shrink_to<24>();
    if (threadIdx.x == 0) produce({&q_map, &k_map, &v_map, &means_map}, base_smem, barriers, item);
    __syncwarp();
  } else {
    registers_grow_to<240>();
    const int consumer = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1;  // the shuffle tells the compiler that it is uniform
    const int thread = threadIdx.x & 127, column = 2 * (threadIdx.x & 3);

    u32 q_rmem[16];                     // A fragments of Q K^T
    u32 scores[64];                     // s32, of the tile whose codes are made next
    u32 codes_a[16], codes_b[16];       // A fragments of P V: tiles of even and of odd number
    float residual[68];                 // P V of up to GROUP tiles; from [64] on the row sums of up to four tiles, one per thread
    float out_factor[2] = {1.f, 1.f};   // of row and row + 8, as all pairs here: what was flushed is out * out_factor
    float row_sum[2] = {0.f, 0.f};      // over the tiles whose number % 4 == lane % 4
    u32 sums[4] = {0, 0, 0, 0};         // half row sums of the last GROUP tiles, newest on top: A fragment of the mean product
    // Groups of four tiles since the last flush. What lies before a part in its first group of means has row sums of zero.
    int quads = item.first_tile % GROUP / STAGES;
    int group = 0;                      // of the means to be restored next
    bool residual_empty = true;
    // What was flushed: packed half, eight times four for every thread.
    auto out_smem = [&](int i) { return base_smem + Smem::OUT + 16 * (i * CONSUMERS + thread_index() - 128); };
#pragma unroll
    for (int i = 0; i < 8; i++) shared_store(out_smem(i), make_uint4(0, 0, 0, 0));
#pragma unroll
    for (int i = 0; i < 68; i++) residual[i] = 0.f;

    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = first_query_row(item.q_tile) + 8 * r;
      scale[r] = row < s_q ? q_scale_gmem[static_cast<i64>(item.bh) * s_q_pad + row] : 1.f;
    }
    RowCodes rows[2];

    const u64 k_descriptor = matrix_descriptor<128>(base_smem + Smem::K);
    const u64 v_descriptor = matrix_descriptor<128>(base_smem + Smem::V);

    // Start values for the scores of the tile whose first key is `first_key`: issue_qk then accumulates.
    auto start_scores = [&](int first_key) {
      const int keys = item.keys - first_key - column;
#pragma unroll
      for (int i = 0; i < 64; i++) scores[i] = 8 * (i / 4) + (i & 1) < keys ? 0u : PADDING_SCORE;
    };
    auto issue_qk = [&](int stage, bool started) { issue_query_key(scores, q_rmem, k_descriptor, stage, started); };
    auto issue_pv = [&](const u32 (&codes)[16], int stage, bool accumulate) {
#pragma unroll
      for (int k = 0; k < 4; k++)
        wgmma_m64n136k32_e4m3(residual, codes[4 * k], codes[4 * k + 1], codes[4 * k + 2], codes[4 * k + 3],
                              v_descriptor + static_cast<u64>(stage * (V_BYTES / 16) + 2 * k), accumulate || k > 0);
      wgmma_commit();
    };
    // Row sums (at most 128 * 448, a half) times means, onto P V.
    auto issue_means = [&]() {
      wgmma_m64n128k16_f32_f16(residual, sums[0], sums[1], sums[2], sums[3],
                           matrix_descriptor<32>(base_smem + Smem::MEAN + (group & 1) * MEANS_BYTES));
      wgmma_commit();
    };
    auto wait_means = [&]() { mbarrier_wait(barriers.means_full(group & 1), (group >> 1) & 1); };
    auto release = [&](int stage) {
      if (thread < CLUSTER) mbarrier_arrive_cluster(barriers.empty(stage), thread);
    };

    // New maxima of the thread's rows, from the scores. `growing`: lower where each eighth of the keys (0, 8, 16, ... and so on) has one
    // within a quarter of MAX_CODE, 3.5 octaves.
    auto raise_maximum = [&](bool growing) {
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
    };
    // Scales everything accumulated under the offsets (row, row + 8) to the present ones.
    auto scale_accumulated = [&](u32 old_offsets) {
      const int old[2] = {signed_low_16(old_offsets), signed_high_16(old_offsets)};
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        factor[r] = exp2_approx(static_cast<float>(signed_low_16(rows[r].offset) - old[r]) * half_low(rows[r].scale) * .125f);
        row_sum[r] *= factor[r];
        out_factor[r] *= factor[r];
      }
#pragma unroll
      for (int i = 0; i < 68; i++) residual[i] *= factor[(i >> 1) & 1];
#pragma unroll
      for (int i = 0; i < 4; i++)
        sums[i] = pack_half(half_low(sums[i]) * factor[i & 1], half_high(sums[i]) * factor[i & 1]);
    };

    // Codes of the tile whose scores are there, while P V of the tile before is in flight; waits for that. The four warps decide
    // for themselves whether they need new maxima, so no wgmma instruction may stand inside the branch. The branch also keeps
    // ptxas from moving the codes below the wait. What is accumulated is scaled by scale_if_raised, when the next scores are on
    // their way: right behind the wait that branch cost 18 clocks a tile (1217 instead of 1199, H200).
    bool raised = false;
    u32 old_offsets = 0;  // s16 (row, row + 8), valid if raised
    auto softmax = [&](u32 (&codes)[16]) {
      raised = any_code_overflows(scores_to_codes(codes, scores, rows));
      if (raised) {
        pin(scores);
        old_offsets = __byte_perm(rows[0].offset, rows[1].offset, 0x5410);
        raise_maximum(false);
        pin(scores);
        scores_to_codes(codes, scores, rows);
      }
      wgmma_wait<0>();
      pin(residual);
    };
    auto scale_if_raised = [&]() {
      if (raised) scale_accumulated(old_offsets);
    };

    auto push_sums = [&](u32 newest) {  // half (row, row + 8)
      sums[0] = __byte_perm(sums[0], sums[2], 0x5432);
      sums[2] = __byte_perm(sums[2], newest, 0x5432);
      sums[1] = __byte_perm(sums[1], sums[3], 0x5432);
      sums[3] = __byte_perm(sums[3], newest, 0x7632);
    };
    // Sums of four tiles, one per thread of a row. The denominator uses the rounded sums that the means are weighted with, so the
    // weights of the means add up to one: a constant v comes out exactly.
    auto collect_sums = [&]() {
      const u32 newest = pack_half(residual[64], residual[66]);
      push_sums(newest);
      row_sum[0] += half_low(newest);
      row_sum[1] += half_high(newest);
#pragma unroll
      for (int i = 64; i < 68; i++) zero_in_place(residual[i]);
      quads++;
    };
    // residual -> out_smem, which is kept divided by 2 * 2^exponent(row sum): below 60000 + 448 whatever the scores.
    auto flush = [&]() {
      pin(residual);
      residual_empty = true;
      u32 keep[2];
      float scale[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const u32 exponent = __float_as_uint(sum_over_row(row_sum[r])) & 0x7f800000u;
        scale[r] = __uint_as_float(0x7e800000u - exponent);
        keep[r] = broadcast_half(out_factor[r] * scale[r]);
        out_factor[r] = __uint_as_float(exponent + 0x00800000u);
      }
#pragma unroll
      for (int i = 0; i < 8; i++) {
        uint4 out = shared_load<uint4>(out_smem(i));
        auto add = [&](u32& pair, int first) {
          const int r = (first >> 1) & 1;
          pair = half2_fma(pair, keep[r], pack_half(residual[first] * scale[r], residual[first + 1] * scale[r]));
        };
        add(out.x, 8 * i);
        add(out.y, 8 * i + 2);
        add(out.z, 8 * i + 4);
        add(out.w, 8 * i + 6);
        shared_store(out_smem(i), out);
      }
      quads = 0;
    };
    auto release_means = [&]() {
      if (thread == 0) mbarrier_arrive(barriers.means_empty(group & 1));
      group++;
    };
    auto restore_means = [&]() {
      wait_means();
      pin(residual);
      pin(sums);
      wgmma_fence();
      issue_means();
      wgmma_wait<0>();
      pin(residual);
      release_means();
    };

    // The two consumers take turns in issuing products: named barrier 1 + consumer is that consumer's turn.
    auto take_turn = [&]() { named_barrier_sync<CONSUMERS>(1 + consumer); };
    auto pass_turn = [&]() { named_barrier_arrive<CONSUMERS>(1 + (consumer ^ 1)); };
    if (consumer == 1) named_barrier_arrive<CONSUMERS>(1);

    mbarrier_wait(barriers.q_full(), 0);
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int row = first_query_row(0) % 64 + 8 * (i & 1), byte = i / 4 * 32 + (i & 2) * 8 + 2 * column;
      const u32 tile_smem = base_smem + Smem::Q + consumer * 64 * HEAD_DIM;
      q_rmem[i] = shared_load<u32>(tile_smem + row * HEAD_DIM + ((byte / 16) ^ (row & 7)) * 16 + byte % 16);
    }
    pin(q_rmem);
    mbarrier_wait(barriers.full(0), 0);
    start_scores(0);
    pin(scores);
    wgmma_fence();
    issue_qk(0, true);
#pragma unroll
    for (int r = 0; r < 2; r++) rows[r].start(scale[r]);
    wgmma_wait<0>();
    pin(scores);
    release(0);
    raise_maximum(tiles > SHORT_TILES);
    pin(scores);
    scores_to_codes(codes_a, scores, rows);

    // A step: scores of tile + 1, P V of `tile`, codes of tile + 1 over that P V. Between steps nothing is in flight.
    // A tile with padding keys is left to the code behind the loop: in here, scores that are started or not would have to stay live
    // while codes are made, 8 registers too many.
    const int steps = max(item.keys / BLOCK_KV - 1, 0);
    int tile = 0, parity = 0, next_step;
    while (true) {
#pragma unroll
      for (int step = 0; step < STAGES; step++) {
        next_step = step;
        if (tile == steps) goto last_tiles;
        const int stage = (step + 1) % STAGES;
        mbarrier_wait(barriers.full(stage), step == STAGES - 1 ? parity ^ 1 : parity);
        if (step == 0 && quads == GROUP / STAGES) {
          // A group is full: its means are added to its products, then both leave the accumulator. Not a branch of the ordinary
          // step: around products in flight ptxas would serialize them (C7514).
          if (MEANS) wait_means();
          take_turn();
          pin(codes_a);
          pin(codes_b);
          pin(residual);
          pin(sums);
          pin(q_rmem);
          wgmma_fence();
          if (MEANS) issue_means();
          issue_qk(stage, false);
          wgmma_wait<1>();
          pin(residual);
          if (MEANS) release_means();
          scale_if_raised();
          flush();  // hidden below the product
          pin(residual);
          wgmma_fence();
          issue_pv(codes_a, stage, false);
          residual_empty = false;
          pass_turn();
          wgmma_wait<1>();
          pin(scores);
          softmax(codes_b);
        } else {
          take_turn();
          pin(codes_a);
          pin(codes_b);
          pin(q_rmem);
          wgmma_fence();
          issue_qk(stage, false);
          scale_if_raised();
          pin(residual);
          wgmma_fence();
          if (step & 1)
            issue_pv(codes_b, stage, true);
          else
            issue_pv(codes_a, stage, step > 0 || !residual_empty);
          if (step == 0) residual_empty = false;
          pass_turn();
          wgmma_wait<1>();
          pin(scores);
          if (step & 1)
            softmax(codes_a);
          else
            softmax(codes_b);
        }
        release(stage);
        if (step == STAGES - 1) collect_sums();
        tile++;
      }
      parity ^= 1;
    }

  last_tiles:
    if (next_step & 1) {
#pragma unroll
      for (int i = 0; i < 16; i++) codes_a[i] = codes_b[i];
    }
    scale_if_raised();
    auto flush_group = [&]() {
      if (MEANS) restore_means();
      flush();
    };
    if (quads == GROUP / STAGES) flush_group();
    auto wait_next_stage = [&]() {
      const int stage = (next_step + 1) % STAGES;
      mbarrier_wait(barriers.full(stage), next_step == STAGES - 1 ? parity ^ 1 : parity);
      return stage;
    };
    if (tile < tiles - 1) {
      start_scores((tile + 1) * BLOCK_KV);
      const int stage = wait_next_stage();
      pin(scores);
      pin(codes_a);
      pin(residual);
      wgmma_fence();
      issue_qk(stage, true);
      issue_pv(codes_a, stage, !residual_empty);
      residual_empty = false;
      wgmma_wait<0>();
      pin(scores);
      pin(residual);
      softmax(codes_a);
      release(stage);
      if (++next_step == STAGES) collect_sums();
      scale_if_raised();
      if (next_step == STAGES) {
        if (quads == GROUP / STAGES) flush_group();
        next_step = 0;
        parity ^= 1;
      }
    }
    const Item item(schedule, s_kv);  // anew: over the loop it would cost registers
    // Factors of channels 8 n + column and the next one, on their way while the last product runs.
    float2 v_scale[16];
#pragma unroll
    for (int n = 0; n < 16; n++)
      v_scale[n] = *reinterpret_cast<const float2*>(v_scale_gmem + static_cast<i64>(item.bh) * HEAD_DIM + 8 * n + column);
    const int last_stage = wait_next_stage();
    pin(codes_a);
    pin(residual);
    wgmma_fence();
    issue_pv(codes_a, last_stage, !residual_empty);
    wgmma_wait<0>();
    pin(residual);
    collect_sums();
    while (quads < GROUP / STAGES) {
      push_sums(0u);
      quads++;
    }
    if (MEANS) restore_means();
    if (consumer == 0) named_barrier_sync<CONSUMERS>(1);  // takes the turn passed last, so that the barrier ends empty

    // With what was flushed.
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint4 flushed = shared_load<uint4>(out_smem(i));
      auto add = [&](u32 pair, int first) {
        const float factor = out_factor[(first >> 1) & 1];
        residual[first] = fmaf(half_low(pair), factor, residual[first]);
        residual[first + 1] = fmaf(half_high(pair), factor, residual[first + 1]);
      };
      add(flushed.x, 8 * i);
      add(flushed.y, 8 * i + 2);
      add(flushed.z, 8 * i + 4);
      add(flushed.w, 8 * i + 6);
    }
    u16* out = out_gmem + (item.bh / heads) * out_stride_b + (item.bh % heads) * out_stride_h;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float sum = sum_over_row(row_sum[r]), inverse = 1.f / sum;
      // Channels 8 n + column and the next one, in units of v_scale.
      auto two_outputs = [&](int n) { return make_float2(residual[4 * n + 2 * r] * inverse, residual[4 * n + 2 * r + 1] * inverse); };
      const int row = first_query_row(item.q_tile) + 8 * r;
      if (item.part >= 0) {
        const int part_row = item.part_row(first_query_row(0) + 8 * r);
        u16* out_row = schedule.part_out_gmem + static_cast<i64>(part_row) * HEAD_DIM + column;
#pragma unroll
        for (int n = 0; n < 16; n++) {
          const float2 two = two_outputs(n);
          *reinterpret_cast<u32*>(out_row + 8 * n) = pack_half(two.x, two.y);
        }
        if (column == 0) schedule.part_row_gmem[part_row] = {sum, signed_low_16(rows[r].offset)};
      } else if (row < s_q) {
        u16* out_row = out + row * out_stride_s + column;
#pragma unroll
        for (int n = 0; n < 16; n++) {
          const float2 two = two_outputs(n);
          *reinterpret_cast<u32*>(out_row + 8 * n) = pack_output<OUT_HALF>(two.x * v_scale[n].x, two.y * v_scale[n].y);
        }
      }
    }
  }
  cluster_sync();  // shared memory must outlive the loads and signals of the other block
}
