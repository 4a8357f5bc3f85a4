// The precise 8-bit attention for Hopper (sm_90a): softmax(q k^T) v without mask, INT8 q and k, unsigned 8-bit probabilities that
// are linear in exp2 of the score, INT8 values.
//
// Semantics. Per (batch, head): v = v_scale * (block_scale * residual + mean of its 128-token block), so
//     out[i] = v_scale * (sum_j w[i,j] (block_scale[j] * P[i,j] R[j] + r[i,j] mean[j])) / sum_j w[i,j] r[i,j]
// over tiles j of 128 keys. P holds integers 0..254, where 254 is the largest probability of the row *in this tile*; w is what that
// maximum weighs among all tiles, r the exact sum of P. So a step of P is 1/254 of the tile's maximum, not of the row's: on flat
// rows, where one maximum for 590 tiles leaves most probabilities below 10, the error of P is 6 times smaller (simulated).
// Keys past s_kv have probability exactly 0, whatever the operands hold there; query rows past s_q are never written.
//
// One block: 128 query rows of one head, all keys. Two blocks of a cluster (neighbouring query tiles) share the loads of K and V.
//   warpgroup 0: producer, one thread issues TMA.  Warpgroups 1 and 2: 64 query rows each, alternating on the tensor cores.
// Grid: (query tiles rounded up to CLUSTER, batch * heads). Run-time sizes are scalar for a block.
//
// Requires sm_90a, 384 threads, SHARED_BYTES of dynamic shared memory, and these tensor maps (x, y, z), zero outside:
//   q_map       q8     [BH, s_q, 128]  INT8        box 128 x 64,            128-byte swizzle
//   k_map       k8     [BH, s_kv, 128] INT8        box 128 x 128 / CLUSTER, 128-byte swizzle
//   v_map       v8     [BH, 128, keys] INT8        box 128 x 128 / CLUSTER, 128-byte swizzle
//   scales_map  scales [BH, blocks, 128] FP32      box 128 x 1
//   means_map   means  [BH, 128, slots] half       box 16 x 128,            32-byte swizzle
// s_q and s_kv in the maps are the real lengths, so TMA itself zeroes the padding of q8 and k8. Keys of v8 and slots of the means are
// permuted as for attention_sm90.cu. Layout and a plain version: quantize/precise.py and attend/precise.py.
//
// Switches: -DMEANS=0 leaves the means out (ablation), -DOUT_HALF=1 writes half instead of bfloat16.
#include "common_sm90.cuh"

#ifndef MEANS
#define MEANS 1
#endif
#ifndef OUT_HALF
#define OUT_HALF 0
#endif

constexpr int HEAD_DIM = 128;
constexpr int BLOCK_Q = 128;
constexpr int BLOCK_KV = 128;
constexpr int STAGES = 4;
constexpr int CLUSTER = 2;
constexpr int GROUP = 16;  // tiles whose means are restored by one product
constexpr int THREADS = 384;
constexpr int CONSUMERS = 256;
constexpr int SHARED_BYTES = 162 * 1024;  // attend/precise_cuda.py reserves this

// Probabilities reach this many octaves below the tile's maximum; at the end they are 0.43 of a step, so they round to 0.
constexpr float OCTAVES = 9.2f;
// A new reference maximum is taken when a tile's is this far above the old one.
constexpr float HEADROOM = 8.f;
// Everything accumulated is divided by 2^WEIGHT_SHIFT: the weighted row sums of a tile, at most 2^HEADROOM 128 255, fit half.
constexpr float WEIGHT_SHIFT = 8.f;
constexpr int HALF_ONE = 0x3c00;  // bits of 1.0 in half; bits HALF_ONE + u are 1 + u / 1024 for u up to 1023

// Score of a padding key, in units of 256. Real scores are in -8065..8064, so it is below every maximum by more than u_max <= 1023,
// and score + offset stays in 16 bits.
constexpr u32 PADDING_SCORE = static_cast<u32>(-16384 * 256);
static_assert(-16384 + 8065 + 1023 < 0 && -16384 + HALF_ONE - 8064 >= -32768 && HALF_ONE + 1023 + 8065 < 32768,
              "a padding key has probability 0, and no sum leaves 16 bits");

constexpr int K_BYTES = BLOCK_KV * HEAD_DIM;
constexpr int V_BYTES = HEAD_DIM * BLOCK_KV;
constexpr int SCALES_BYTES = HEAD_DIM * 4;
constexpr int MEANS_BYTES = HEAD_DIM * GROUP * 2;
constexpr int SUMS_BYTES = CONSUMERS * 4 * 4;  // four words of each consumer thread, see RowSums

// Stage t holds one pair {K tile p, V tile p - 1} with p % STAGES == t: what one step of a consumer needs.
struct Smem {
  static constexpr int K = 0;
  static constexpr int V = K + STAGES * K_BYTES;
  static constexpr int Q = V + STAGES * V_BYTES;
  static constexpr int MEAN = Q + BLOCK_Q * HEAD_DIM;
  static constexpr int SCALES = MEAN + 2 * MEANS_BYTES;
  static constexpr int SUMS = SCALES + STAGES * SCALES_BYTES;
  static constexpr int BARRIERS = SUMS + SUMS_BYTES;
  static constexpr int BYTES = BARRIERS + 8 * (2 * STAGES + 5);
};
static_assert(Smem::BYTES + 1023 <= SHARED_BYTES, "tiles and barriers, and the way to an address that is a multiple of 1024");

struct Barriers {
  u32 base_smem;
  DEVICE u32 full(int stage) const { return base_smem + 8 * stage; }
  DEVICE u32 empty(int stage) const { return base_smem + 8 * (STAGES + stage); }
  DEVICE u32 means_full(int buffer) const { return base_smem + 8 * (2 * STAGES + buffer); }
  DEVICE u32 means_empty(int buffer) const { return base_smem + 8 * (2 * STAGES + 2 + buffer); }
  DEVICE u32 q_full() const { return base_smem + 8 * (2 * STAGES + 4); }

  DEVICE void init() const {
    for (int s = 0; s < STAGES; s++) {
      mbarrier_init(full(s), 1);
      // Every consumer warp of every block that the stage's halves go to: warps read the scales on their own.
      mbarrier_init(empty(s), CONSUMERS / 32 * CLUSTER);
    }
    for (int i = 0; i < 2; i++) {
      mbarrier_init(means_full(i), 1);
      mbarrier_init(means_empty(i), 2);
    }
    mbarrier_init(q_full(), 1);
    fence_mbarrier_init();
  }
};

struct Maps {
  const TensorMap *q, *k, *v, *scales, *means;
};

// One thread. Loads q once, then all pairs of tiles; its half of K and V goes to both blocks of the cluster.
DEVICE void produce(const Maps& maps, u32 shared_smem, Barriers barriers, int q_tile, int bh, int tiles) {
  const u32 rank = cluster_rank();
  const u16 everyone = (1 << CLUSTER) - 1;
  mbarrier_expect_bytes(barriers.q_full(), BLOCK_Q * HEAD_DIM);
  for (int half = 0; half < 2; half++)
    tma_load_3d(shared_smem + Smem::Q + half * 64 * HEAD_DIM, maps.q, 0, q_tile * BLOCK_Q + half * 64, bh, barriers.q_full());

  int group = 0;
  auto load_means = [&]() {
    const int buffer = group & 1;
    mbarrier_wait(barriers.means_empty(buffer), ((group >> 1) & 1) ^ 1);
    mbarrier_expect_bytes(barriers.means_full(buffer), MEANS_BYTES);
    tma_load_3d(shared_smem + Smem::MEAN + buffer * MEANS_BYTES, maps.means, group * GROUP, 0, bh, barriers.means_full(buffer));
    group++;
  };

  int stage = 0, parity = 1;
  for (int pair = 0; pair <= tiles; pair++) {
    mbarrier_wait(barriers.empty(stage), parity);
    mbarrier_expect_bytes(barriers.full(stage), (pair < tiles ? K_BYTES : 0) + (pair > 0 ? V_BYTES + SCALES_BYTES : 0));
    if (pair < tiles)
      tma_load_3d_multicast(shared_smem + Smem::K + stage * K_BYTES + rank * (K_BYTES / CLUSTER), maps.k, 0,
                            pair * BLOCK_KV + rank * (BLOCK_KV / CLUSTER), bh, barriers.full(stage), everyone);
    if (pair > 0) {
      tma_load_3d_multicast(shared_smem + Smem::V + stage * V_BYTES + rank * (V_BYTES / CLUSTER), maps.v, (pair - 1) * BLOCK_KV,
                            rank * (HEAD_DIM / CLUSTER), bh, barriers.full(stage), everyone);
      tma_load_3d(shared_smem + Smem::SCALES + stage * SCALES_BYTES, maps.scales, 0, pair - 1, bh, barriers.full(stage));
    }
    // In the middle of a group: late enough that the buffer is free again, early enough for the group's end.
    if (MEANS && pair % GROUP == GROUP / 2 && group * GROUP < tiles) load_means();
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  if (MEANS && group * GROUP < tiles) load_means();
}

// What turns the scores of one row and tile into probabilities. A score is bits 8..23 of q8 . k8, so 256 units, and
//   u = max(score - maximum + u_max, 0);  t = u * slope / 1024;  probability = 254 * 2^(OCTAVES (t - 1))
// with u_max the largest number for which t does not pass 1. Adding HALF_ONE to u makes the half 1 + u / 1024, and since the 1 times
// the slope is exact, one multiply-add gives t with one rounding. All of it twice, for packed instructions.
struct RowMap {
  u32 offset;  // s16: HALF_ONE + u_max - maximum of the row in this tile
  u32 slope;   // half: t per 1024 units of 256
};

DEVICE u32 packed(u32 half_bits) { return half_bits * 0x10001u; }

// 1024 + probability, as packed half: the probabilities are the low bytes.
DEVICE u32 two_probabilities(u32 scores, const RowMap& row) {
  const u32 t = half2_fma(__viaddmax_s16x2(scores, row.offset, packed(HALF_ONE)), row.slope, row.slope ^ packed(0x8000));
  // 254^(1/8) 2^(OCTAVES/8 (t - 1)), a cubic fitted in half arithmetic; its eighth power is within 0.6 %, 0.2 % in the mean.
  u32 y = half2_fma(t, packed(0x2f15), packed(0x3441));
  y = half2_fma(y, t, packed(0x39c5));
  y = half2_fma(y, t, packed(0x3b35));
  y = half2_mul(y, y);
  y = half2_mul(y, y);
  return half2_fma(y, y, packed(0x6400));
}

DEVICE float sum_over_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float2 load_float2_smem(u32 address_smem) {
  float2 y;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(y.x), "=f"(y.y) : "r"(address_smem));
  return y;
}

// Weighted row sums of the present GROUP tiles, as half: the thread's A fragment of the mean product, in its own four words of shared
// memory. Thread c of a quad keeps the tiles whose number % 4 == c; tile 4 n + c of the group is half n % 2 of word 2 (n / 2) for its
// row, and of the word behind that for row + 8.
struct RowSums {
  u32 words_smem;  // of the thread, CONSUMERS words apart

  DEVICE u32 word(int i) const { return words_smem + i * CONSUMERS * 4; }
  DEVICE u32 get(int i) const {
    u32 y;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(y) : "r"(word(i)));
    return y;
  }
  DEVICE void set(int i, u32 x) const { asm volatile("st.shared.u32 [%0], %1;" ::"r"(word(i)), "r"(x)); }
  DEVICE void clear() const {
    for (int i = 0; i < 4; i++) set(i, 0u);
  }
  DEVICE void scale(const float (&factor)[2]) const {
    for (int i = 0; i < 4; i++) set(i, half2_mul(get(i), broadcast_half(factor[i & 1])));
  }
  DEVICE void store(int tile, u32 both_rows) const {
    const int n = tile / 4 % 4;
    const u32 place = word(n / 2 * 2) + n % 2 * 2;
    asm volatile(
        "{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\n"
        "st.shared.b16 [%0], lo;\nst.shared.b16 [%0 + %2], hi;\n}" ::"r"(place), "r"(both_rows), "n"(CONSUMERS * 4));
  }
};

#if OUT_HALF
DEVICE float clamp_half(float x) { return fminf(fmaxf(x, -65504.f), 65504.f); }
DEVICE u32 pack_out(float low, float high) { return pack_half(clamp_half(low), clamp_half(high)); }
#else
DEVICE u32 pack_out(float low, float high) { return pack_bfloat16(low, high); }
#endif

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
attention_precise_fwd_kernel(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                             const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap scales_map,
                             const __grid_constant__ TensorMap means_map,
                             const float* __restrict__ q_scale_gmem,  // [BH, s_q_pad]
                             const float* __restrict__ k_scale_gmem,  // [BH, blocks], relative to the head's
                             const float* __restrict__ v_scale_gmem,  // [BH, 128]
                             u16* __restrict__ out_gmem,  // [B, H, s_q, 128], strides in elements, last one 1, the others even
                             i64 out_stride_b, i64 out_stride_h, i64 out_stride_s, int s_q, int s_q_pad, int s_kv, int heads) {
  extern __shared__ char shared[];
  // Swizzled tiles start at multiples of 1024.
  char* base = reinterpret_cast<char*>((reinterpret_cast<u64>(shared) + 1023) & ~1023ull);
  const u32 base_smem = smem_address(base);
  const Barriers barriers{base_smem + Smem::BARRIERS};
  const int q_tile = blockIdx.x, bh = blockIdx.y;
  const int tiles = (s_kv + BLOCK_KV - 1) / BLOCK_KV;

  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  cluster_sync();  // no block may signal a barrier of the other before it is initialized

  if (threadIdx.x < 128) {
    registers_shrink_to<24>();
    if (threadIdx.x == 0) produce({&q_map, &k_map, &v_map, &scales_map, &means_map}, base_smem, barriers, q_tile, bh, tiles);
    __syncwarp();
  } else {
    registers_grow_to<240>();
    const int consumer = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1;  // the shuffle tells the compiler that it is uniform
    // What follows from the thread's number is computed where it is used: over the loop it would cost registers.
    auto thread = []() { return thread_index() & 127; };
    auto column = []() { return static_cast<int>(2 * (thread_index() & 3)); };
    auto first_row = [&]() {  // the thread's rows are this and + 8
      const int index = static_cast<int>(thread_index()) - 128;
      return q_tile * BLOCK_Q + index / 32 * 16 + index % 32 / 4;
    };

    u32 scores[64];                                    // s32, of the tile whose probabilities are made next
    u32 probabilities[16];                             // bytes: A fragments of P V
    u32 product[64];                                   // s32, P V of one tile
    float output[64];                                  // as everything accumulated: in units of 2^(reference - WEIGHT_SHIFT)
    const float no_reference = __int_as_float(0xff800000);
    float reference[2] = {no_reference, no_reference};  // of row and row + 8, as all pairs here: octaves, whole numbers
    float weight[2] = {0.f, 0.f};                      // of the last tile's probabilities
    float row_sum[2] = {0.f, 0.f};                     // over the tiles whose number % 4 == lane % 4
    auto sums = [&]() { return RowSums{base_smem + Smem::SUMS + (thread_index() - 128) * 4}; };
#pragma unroll
    for (int i = 0; i < 64; i++) output[i] = 0.f;
    auto load_q_scale = [&](int row) { return row < s_q ? q_scale_gmem[static_cast<i64>(bh) * s_q_pad + row] : 1.f; };
    const u32 q_scale = pack_half(load_q_scale(first_row()), load_q_scale(first_row() + 8));  // they are half numbers

    const u64 q_descriptor = matrix_descriptor<128>(base_smem + Smem::Q + consumer * 64 * HEAD_DIM);
    const u64 k_descriptor = matrix_descriptor<128>(base_smem + Smem::K);
    const u64 v_descriptor = matrix_descriptor<128>(base_smem + Smem::V);

    auto issue_qk = [&](int stage) {
#pragma unroll
      for (int k = 0; k < 4; k++)
        wgmma_m64n128k32_s8(scores, q_descriptor + 2 * k, k_descriptor + static_cast<u64>(stage * (K_BYTES / 16) + 2 * k), k > 0);
    };
    auto issue_pv = [&](int stage) {
#pragma unroll
      for (int k = 0; k < 4; k++)
        wgmma_m64n128k32_u8s8(product, probabilities[4 * k], probabilities[4 * k + 1], probabilities[4 * k + 2],
                              probabilities[4 * k + 3], v_descriptor + static_cast<u64>(stage * (V_BYTES / 16) + 2 * k), k > 0);
    };
    auto issue_means = [&](const u32 (&fragment)[4], int group) {
      wgmma_m64n128k16_f32_f16(output, fragment[0], fragment[1], fragment[2], fragment[3],
                               matrix_descriptor<32>(base_smem + Smem::MEAN + (group & 1) * MEANS_BYTES));
    };
    auto start_products = [&]() {
      pin(scores);
      pin(probabilities);
      pin(product);
      pin(output);
      wgmma_fence();
    };
    auto release = [&](int stage) {
      const u32 lane = thread_index() & 31;
      if (lane < CLUSTER) mbarrier_arrive_cluster(barriers.empty(stage), lane);
    };
    auto mask_padding = [&](int first_key) {
      const int keys = s_kv - first_key - column();
#pragma unroll
      for (int i = 0; i < 64; i++)
        if (8 * (i / 4) + (i & 1) >= keys) scores[i] = PADDING_SCORE;
    };

    // output += weight * block scale * product, for the tile in `stage`. A tile that weighs nothing in all rows of the warp is left out;
    // the branch also keeps ptxas from moving this below the wait for the scores.
    auto promote = [&](int stage) {
      if (!__any_sync(~0u, weight[0] + weight[1] > 0.f)) return;
      const u32 scales_smem = base_smem + Smem::SCALES + stage * SCALES_BYTES + column() * 4;
#pragma unroll
      for (int n = 0; n < 16; n++) {
        const float2 scale = load_float2_smem(scales_smem + 32 * n);
#pragma unroll
        for (int i = 0; i < 4; i++)
          output[4 * n + i] = fmaf(weight[i >> 1] * (i & 1 ? scale.y : scale.x), static_cast<float>(static_cast<int>(product[4 * n + i])),
                                   output[4 * n + i]);
      }
    };
    // Raises the references of rows whose maximum in this tile is far above, and scales what is accumulated, by a power of two.
    auto raise_references = [&](const float (&maximum)[2]) {
      const bool above[2] = {maximum[0] > reference[0] + HEADROOM, maximum[1] > reference[1] + HEADROOM};
      if (!__any_sync(~0u, above[0] || above[1])) return;
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float raised = above[r] ? ceilf(maximum[r]) : reference[r];
        factor[r] = exp2_approx(reference[r] - raised);
        reference[r] = raised;
        row_sum[r] *= factor[r];
      }
#pragma unroll
      for (int i = 0; i < 64; i++) output[i] *= factor[(i >> 1) & 1];
      sums().scale(factor);
    };
    // scores -> probabilities, weight and sums of tile number `tile`, whose keys have the scale k_scale.
    auto softmax = [&](int tile, float k_scale) {
      u32 s[32];  // two neighbouring keys of one row each
      u32 top[2] = {0x80008000u, 0x80008000u};
#pragma unroll
      for (int i = 0; i < 32; i++) s[i] = __byte_perm(scores[2 * i], scores[2 * i + 1], 0x6521);
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        top[0] = __vimax3_s16x2(top[0], s[i], s[i + 2]);
        top[1] = __vimax3_s16x2(top[1], s[i + 1], s[i + 3]);
      }
      u32 both = __vmaxs2(__byte_perm(top[0], top[1], 0x5410), __byte_perm(top[0], top[1], 0x7632));  // (row, row + 8)
      both = __vmaxs2(both, __shfl_xor_sync(~0u, both, 1));
      both = __vmaxs2(both, __shfl_xor_sync(~0u, both, 2));

      RowMap rows[2];
      float maximum[2];  // octaves
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int highest = r ? signed_high_16(both) : signed_low_16(both);
        const float octaves = (r ? half_high(q_scale) : half_low(q_scale)) * k_scale * .125f;  // per 256 units
        rows[r].slope = broadcast_half(fminf(octaves * (1024.f / OCTAVES), 1024.f));
        const float slope = half_low(rows[r].slope);
        const float u_max = floorf(1024.f * reciprocal_approx(slope));
        rows[r].offset = broadcast_low_16(HALF_ONE + static_cast<int>(u_max) - highest);
        // Of probability 254: half a unit is lost when a score is cut to 16 bits, and t of the maximum is a little below 1.
        maximum[r] = fmaf(static_cast<float>(highest) + .5f, octaves, fmaf(u_max * (-OCTAVES / 1024.f), slope, OCTAVES));
      }
      u32 sum[2] = {0, 0};
#pragma unroll
      for (int g = 0; g < 4; g++) {
        u32 p[8];
#pragma unroll
        for (int i = 0; i < 8; i++) p[i] = two_probabilities(s[8 * g + i], rows[i & 1]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const u32 bytes = __byte_perm(p[(i & 1) + (i >> 1) * 4], p[(i & 1) + (i >> 1) * 4 + 2], 0x6420);
          probabilities[4 * g + i] = bytes;
          sum[i & 1] = __dp4a(bytes, 0x01010101u, sum[i & 1]);
        }
      }
      u32 sum_of_both = sum[0] | sum[1] << 16;  // at most 32640 each
      sum_of_both += __shfl_xor_sync(~0u, sum_of_both, 1);
      sum_of_both += __shfl_xor_sync(~0u, sum_of_both, 2);

      raise_references(maximum);
      weight[0] = exp2_approx(maximum[0] - reference[0] - WEIGHT_SHIFT);
      weight[1] = exp2_approx(maximum[1] - reference[1] - WEIGHT_SHIFT);
      // The denominator uses the rounded sums that the means are weighted with, so the weights of the means add up to one.
      const u32 weighted = pack_half(weight[0] * static_cast<float>(sum_of_both & 0xffff), weight[1] * static_cast<float>(sum_of_both >> 16));
      if (tile % GROUP == 0) sums().clear();
      if (((tile ^ thread()) & 3) == 0) {
        sums().store(tile, weighted);
        row_sum[0] += half_low(weighted);
        row_sum[1] += half_high(weighted);
      }
    };
    auto load_sums = [&](u32 (&fragment)[4]) {
#pragma unroll
      for (int i = 0; i < 4; i++) fragment[i] = sums().get(i);
    };
    auto wait_means = [&](int group) { mbarrier_wait(barriers.means_full(group & 1), (group >> 1) & 1); };

    // The two consumers take turns on the tensor cores: named barrier 1 + consumer is that consumer's turn.
    auto take_turn = [&]() { named_barrier_sync<CONSUMERS>(1 + consumer); };
    auto pass_turn = [&]() { named_barrier_arrive<CONSUMERS>(1 + (consumer ^ 1)); };
    if (consumer == 1) named_barrier_arrive<CONSUMERS>(1);

    const float* k_scales = k_scale_gmem + static_cast<i64>(bh) * tiles;
    mbarrier_wait(barriers.q_full(), 0);
    mbarrier_wait(barriers.full(0), 0);
    start_products();
    issue_qk(0);
    wgmma_commit();
    wgmma_wait<0>();
    pin(scores);
    release(0);
    if (tiles == 1) mask_padding(0);
    softmax(0, k_scales[0]);

    // A step: P V of `tile` (every 16 tiles with the means) and the scores of tile + 1, promotion of P V over those scores, then the
    // probabilities of tile + 1 over the products of the other consumer.
    int stage = 1, parity = 0;
    for (int tile = 0; tile < tiles - 1; tile++) {
      const float k_scale = k_scales[tile + 1];  // arrives below the products
      mbarrier_wait(barriers.full(stage), parity);
      if (MEANS && tile % GROUP == GROUP - 1) {
        const int group = tile / GROUP;
        wait_means(group);
        u32 fragment[4];
        load_sums(fragment);
        take_turn();
        start_products();
        issue_pv(stage);
        issue_means(fragment, group);
        wgmma_commit();
        issue_qk(stage);
        wgmma_commit();
        wgmma_wait<1>();
        pin(product);
        pin(output);
        if (thread() == 0) mbarrier_arrive(barriers.means_empty(group & 1));
      } else {
        take_turn();
        start_products();
        issue_pv(stage);
        wgmma_commit();
        issue_qk(stage);
        wgmma_commit();
        wgmma_wait<1>();
        pin(product);
        pin(output);
      }
      promote(stage);
      wgmma_wait<0>();
      pin(scores);
      pass_turn();
      release(stage);
      if (tile + 2 == tiles && s_kv % BLOCK_KV != 0) mask_padding((tile + 1) * BLOCK_KV);
      softmax(tile + 1, k_scale);
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }

    mbarrier_wait(barriers.full(stage), parity);
    start_products();
    issue_pv(stage);
    wgmma_commit();
    wgmma_wait<0>();
    pin(product);
    promote(stage);
    if (MEANS) {
      const int group = (tiles - 1) / GROUP;
      wait_means(group);
      u32 fragment[4];
      load_sums(fragment);
      start_products();
      issue_means(fragment, group);
      wgmma_commit();
      wgmma_wait<0>();
      pin(output);
    }
    if (consumer == 0) named_barrier_sync<CONSUMERS>(1);  // takes the turn passed last, so that the barrier ends empty

    const float* v_scale = v_scale_gmem + static_cast<i64>(bh) * HEAD_DIM;
    u16* out = out_gmem + (bh / heads) * out_stride_b + (bh % heads) * out_stride_h;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float factor = 1.f / sum_over_row(row_sum[r]);
      const int row = first_row() + 8 * r;
      if (row < s_q) {
        u16* out_row = out + row * out_stride_s + column();
#pragma unroll
        for (int n = 0; n < 16; n++)
          *reinterpret_cast<u32*>(out_row + 8 * n) = pack_out(output[4 * n + 2 * r] * factor * v_scale[8 * n + column()],
                                                              output[4 * n + 2 * r + 1] * factor * v_scale[8 * n + column() + 1]);
      }
    }
  }
  cluster_sync();  // shared memory must outlive the loads and signals of the other block
}
