// The precise 8-bit attention for Hopper (sm_90a): softmax(q k^T) v without mask, INT8 q and k, probabilities and values of 16 bits.
//
// Semantics. Per (batch, head): out[i] = sum_t p[i,t] v[t] / sum_t e[i,t], with e[i,t] = 2^(score - reference of the row) in FP32 and
// p its half or bfloat16, whichever v has. Keys past s_kv have probability exactly 0, query rows past s_q are never written.
//
// Blocks: attention_tiles_sm90.cuh. Grid: (query tiles rounded up to CLUSTER, batch * heads). What limits it is not the tensor cores
// but the instructions beside them, so a score costs three and a half of those: a multiply-add, an exponential, an addition to the
// row's sum and half a conversion. There is no conversion of scores to float, because they are floats (see MAGIC), and no maximum of a
// tile, because row sums tell when one is due (see softmax).
//
// Requires sm_90a, 384 threads, SHARED_BYTES of dynamic shared memory, and these tensor maps (x, y, z, w), zero outside:
//   q_map  q8  [BH, s_q, 128]    INT8  box 128 x 64,            128-byte swizzle
//   k_map  k8  [BH, s_kv, 128]   INT8  box 128 x 128 / CLUSTER, 128-byte swizzle
//   v_map  v   [B, H, s_kv, 128] half or bfloat16, box 128 / CLUSTER x 128, 128-byte swizzle
// Their lengths are the real ones, so TMA itself zeroes the padding. Layout and a plain version: quantize/precise.py and
// attend/precise.py.
//
// Switch: -DOUT_HALF=1 takes half for probabilities, values and output instead of bfloat16.
#include "attention_tiles_sm90.cuh"

#ifndef OUT_HALF
#define OUT_HALF 0
#endif

constexpr int SHARED_BYTES = 210 * 1024;  // attend/precise_cuda.py reserves this

// Scores are accumulated on top of these bits, those of the float 1.5 * 2^23: up to 2^22 away the bits of an integer are then those of
// a float, MAGIC_FLOAT + score. |score| is at most 127 * 127 * 128 < 2^21.
constexpr u32 MAGIC = 0x4B400000;
constexpr float MAGIC_FLOAT = 12582912.f;
constexpr u32 PADDING_SCORE = 0xFF000000;  // the float -1.7e38, and as an integer below every score

// A new reference puts the row's largest probability at 2^TOP, rounded up to a whole octave. It is taken when the sum of a thread's 32
// probabilities of a row and tile passes SUM_LIMIT, so a probability reaches 2^15 at most, which is a half.
constexpr float TOP = 4.f;
constexpr float SUM_LIMIT = 32768.f;

constexpr int V_BYTES = BLOCK_KV * HEAD_DIM * 2;

struct Smem {
  static constexpr int K = 0;
  static constexpr int V = K + STAGES * K_BYTES;
  static constexpr int Q = V + STAGES * V_BYTES;
  static constexpr int BARRIERS = Q + Q_BYTES;
  static constexpr int BYTES = BARRIERS + 8 * (StageBarriers::COUNT + 1);
};
static_assert(Smem::BYTES + 1023 <= SHARED_BYTES, "tiles and barriers, and the way to an address that is a multiple of 1024");

struct Barriers : StageBarriers {
  DEVICE u32 q_full() const { return base_smem + 8 * COUNT; }

  DEVICE void init() const {
    init_stages();
    mbarrier_init(q_full(), 1);
    fence_mbarrier_init();
  }
};

// Place in the ring of stages; `parity` is that of its barriers' phase.
struct Stage {
  int index, parity;
  DEVICE void advance() {
    if (++index == STAGES) {
      index = 0;
      parity ^= 1;
    }
  }
};

struct Maps {
  const TensorMap *q, *k, *v;
};

// One thread. Loads q once, then all pairs of tiles; its half of each goes to both blocks of the cluster.
DEVICE void produce(const Maps& maps, u32 shared_smem, Barriers barriers, int q_tile, int batch, int head, int heads, int tiles) {
  const int rank = cluster_rank(), bh = batch * heads + head;
  const u16 everyone = (1 << CLUSTER) - 1;
  load_query_tile(shared_smem + Smem::Q, maps.q, q_tile, bh, barriers.q_full());

  Stage stage{0, 1};
  for (int pair = 0; pair <= tiles; pair++) {
    const u32 full = barriers.full(stage.index);
    mbarrier_wait(barriers.empty(stage.index), stage.parity);
    mbarrier_expect_bytes(full, (pair < tiles ? K_BYTES : 0) + (pair > 0 ? V_BYTES : 0));
    if (pair < tiles) load_key_tile(shared_smem + Smem::K + stage.index * K_BYTES, maps.k, pair, bh, rank, full);
    if (pair > 0)
      tma_load_4d_multicast(shared_smem + Smem::V + stage.index * V_BYTES + rank * (V_BYTES / CLUSTER), maps.v,
                            rank * (HEAD_DIM / CLUSTER), (pair - 1) * BLOCK_KV, head, batch, full, everyone);
    stage.advance();
  }
}

// A fragments of 64 rows of 128 INT8, which TMA has written with a 128-byte swizzle; `row` of them and row + 8 are the thread's, and
// its first column is `column`.
DEVICE void load_query_fragments(u32 (&q_rmem)[16], u32 rows_smem, int row, int column) {
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const int byte = i / 4 * 32 + (i & 2) * 8 + 2 * column;
    q_rmem[i] = shared_load<u32>(rows_smem + (row + 8 * (i & 1)) * 128 + ((byte / 16) ^ ((row + 8 * (i & 1)) & 7)) * 16 + byte % 16);
  }
  pin(q_rmem);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
attention_precise_fwd_kernel(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                             const __grid_constant__ TensorMap v_map,
                             const float* __restrict__ q_scale_gmem,  // [BH, s_q_pad]
                             const float* __restrict__ k_scale_gmem,  // [BH, blocks], relative to the head's
                             u16* __restrict__ out_gmem,  // [B, H, s_q, 128], strides in elements, last one 1, the others even
                             i64 out_stride_b, i64 out_stride_h, i64 out_stride_s, int s_q, int s_q_pad, int s_kv, int heads) {
  extern __shared__ char shared[];
  const u32 base_smem = smem_address(first_tile(shared));
  const Barriers barriers{base_smem + Smem::BARRIERS};
  const int q_tile = blockIdx.x, bh = blockIdx.y;
  const int tiles = (s_kv + BLOCK_KV - 1) / BLOCK_KV;

  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  cluster_sync();  // no block may signal a barrier of the other before it is initialized

  if (threadIdx.x < 128) {
    registers_shrink_to<24>();
    if (threadIdx.x == 0)
      produce({&q_map, &k_map, &v_map}, base_smem, barriers, q_tile, bh / heads, bh % heads, heads, tiles);
    __syncwarp();
  } else {
    registers_grow_to<240>();
    const int consumer = __shfl_sync(~0u, threadIdx.x >> 7, 0) - 1;  // the shuffle tells the compiler that it is uniform
    // What follows from the thread's number is computed where it is used: over the loop it would cost registers.
    auto column = []() { return static_cast<int>(2 * (thread_index() & 3)); };

    u32 q_rmem[16];                // A fragments of Q K^T
    u32 scores[64];                // MAGIC + s32, of the tile whose probabilities are made next
    u32 p_even[32], p_odd[32];     // probabilities, A fragments of P V: of tiles of even and of odd number
    float output[64];
    float row_sum[2] = {0.f, 0.f};  // of row and row + 8, as all pairs here: over the thread's columns
    float reference[2];             // octaves: whole numbers
    float octaves[2];               // of one unit of q8 . k8 where the key block's scale is 1
    float factor[2];                // of everything accumulated, to the present references; valid if raised
    bool raised = false;
#pragma unroll
    for (int i = 0; i < 64; i++) output[i] = 0.f;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = first_query_row(q_tile) + 8 * r;
      octaves[r] = (row < s_q ? q_scale_gmem[static_cast<i64>(bh) * s_q_pad + row] : 1.f) * (1.f / 2048.f);
      reference[r] = __int_as_float(0xff800000);  // minus infinity
    }

    const u64 k_descriptor = matrix_descriptor<128>(base_smem + Smem::K);
    const u64 v_descriptor = transposed_descriptor<V_BYTES / CLUSTER>(base_smem + Smem::V);

    auto start_scores = [&]() {
#pragma unroll
      for (int i = 0; i < 64; i++) scores[i] = MAGIC;
      pin(scores);
    };
    auto issue_qk = [&](int stage) { issue_query_key(scores, q_rmem, k_descriptor, stage, true); };
    auto issue_pv = [&](const u32 (&p)[32], int stage) {
#pragma unroll
      for (int k = 0; k < 8; k++)
        wgmma_m64n128k16_transposed<OUT_HALF>(output, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3],
                                              v_descriptor + static_cast<u64>(stage * (V_BYTES / 16) + 16 * 8 * k));
      wgmma_commit();
    };
    auto release = [&](int stage) {
      const u32 block = thread_index() & 127;
      if (block < CLUSTER) mbarrier_arrive_cluster(barriers.empty(stage), block);
    };

    auto mask_padding = [&](int first_key) {
      const int keys = s_kv - first_key - column();
#pragma unroll
      for (int i = 0; i < 64; i++)
        if (8 * (i / 4) + (i & 1) >= keys) scores[i] = PADDING_SCORE;
    };
    // Probabilities under the present references, and their sums.
    auto exponentiate = [&](u32 (&p)[32], float (&sums)[2], const float (&slope)[2]) {
      float offset[2], sum[4];  // sum[r] and sum[r + 2]: of the thread's even and odd columns of a row
#pragma unroll
      for (int r = 0; r < 2; r++) offset[r] = fmaf(MAGIC_FLOAT, slope[r], reference[r]);
#pragma unroll
      for (int i = 0; i < 32; i++) {
        const int r = i & 1;
        const float low = exp2_approx(fmaf(__uint_as_float(scores[2 * i]), slope[r], -offset[r]));
        const float high = exp2_approx(fmaf(__uint_as_float(scores[2 * i + 1]), slope[r], -offset[r]));
        p[i] = OUT_HALF ? pack_half(low, high) : pack_bfloat16(low, high);
        sum[r] = i < 2 ? low : sum[r] + low;
        sum[r + 2] = i < 2 ? high : sum[r + 2] + high;
      }
#pragma unroll
      for (int r = 0; r < 2; r++) sums[r] = sum[r] + sum[r + 2];
    };
    // New references of the thread's rows, from the scores.
    auto raise_references = [&](const float (&slope)[2]) {
      int top[2] = {static_cast<int>(PADDING_SCORE), static_cast<int>(PADDING_SCORE)};
#pragma unroll
      for (int i = 0; i < 64; i++) top[(i >> 1) & 1] = max(top[(i >> 1) & 1], static_cast<int>(scores[i]));
#pragma unroll
      for (int r = 0; r < 2; r++) {
        top[r] = max(top[r], __shfl_xor_sync(~0u, top[r], 1));
        top[r] = max(top[r], __shfl_xor_sync(~0u, top[r], 2));
        const float highest = ceilf((__int_as_float(top[r]) - MAGIC_FLOAT) * slope[r]) - TOP;
        const float old = reference[r];
        reference[r] = fmaxf(old, highest);
        factor[r] = exp2_approx(old - reference[r]);
        row_sum[r] *= factor[r];
      }
    };
    // Probabilities of the tile whose scores are there, while P V of the tile before is in flight. Infinity is above the limit, too: no
    // score is lost. The four warps decide for themselves, so no wgmma instruction may stand inside the branch. The branch also keeps
    // ptxas from moving the exponentials below the wait for P V. What is accumulated is scaled below the next Q K^T.
    auto softmax = [&](u32 (&p)[32], float k_scale) {
      const float slope[2] = {octaves[0] * k_scale, octaves[1] * k_scale};
      float sums[2];
      exponentiate(p, sums, slope);
      raised = __any_sync(~0u, fmaxf(sums[0], sums[1]) > SUM_LIMIT);
      if (raised) {
        pin(scores);
        raise_references(slope);
        pin(scores);
        exponentiate(p, sums, slope);
      }
#pragma unroll
      for (int r = 0; r < 2; r++) row_sum[r] += sums[r];
    };
    auto scale_if_raised = [&]() {
      if (raised) {
#pragma unroll
        for (int i = 0; i < 64; i++) output[i] *= factor[(i >> 1) & 1];
      }
    };

    Stage stage{0, 0};
    const float* k_scales = k_scale_gmem + static_cast<i64>(bh) * tiles;
    mbarrier_wait(barriers.q_full(), 0);
    load_query_fragments(q_rmem, base_smem + Smem::Q + consumer * 64 * HEAD_DIM, first_query_row(q_tile) % 64, column());
    mbarrier_wait(barriers.full(0), 0);
    start_scores();
    wgmma_fence();
    issue_qk(0);
    wgmma_wait<0>();
    pin(scores);
    release(0);
    stage.advance();
    if (tiles == 1) mask_padding(0);
    {
      const float slope[2] = {octaves[0] * k_scales[0], octaves[1] * k_scales[0]};
      raise_references(slope);
      pin(scores);
      exponentiate(p_even, row_sum, slope);
    }

    auto issue = [&](const u32 (&p)[32]) {
      mbarrier_wait(barriers.full(stage.index), stage.parity);
      start_scores();
      wgmma_fence();
      issue_qk(stage.index);
      scale_if_raised();
      pin(output);
      wgmma_fence();
      issue_pv(p, stage.index);
    };
    // Probabilities of `tile` + 1 while P V of `tile` runs. Between steps nothing is in flight.
    auto step = [&](u32 (&p_next)[32], u32 (&p)[32], int tile) {
      const float k_scale = k_scales[tile + 1];
      pin(p);
      pin(p_next);
      pin(q_rmem);
      issue(p);
      wgmma_wait<1>();
      pin(scores);
      softmax(p_next, k_scale);
      wgmma_wait<0>();
      pin(output);
      release(stage.index);
      stage.advance();
    };
    const int steps = max(s_kv / BLOCK_KV - 1, 0);  // without padding keys
    int tile = 0;
#pragma unroll 1
    for (; tile + 1 < steps; tile += 2) {
      step(p_odd, p_even, tile);
      step(p_even, p_odd, tile + 1);
    }
    // The last ones, two at most: one behind the other, and with padding keys.
#pragma unroll 1
    for (; tile < tiles - 1; tile++) {
      pin(p_even);
      issue(p_even);
      wgmma_wait<0>();
      pin(scores);
      pin(output);
      mask_padding((tile + 1) * BLOCK_KV);
      softmax(p_even, k_scales[tile + 1]);
      release(stage.index);
      stage.advance();
    }
    mbarrier_wait(barriers.full(stage.index), stage.parity);
    scale_if_raised();
    pin(p_even);
    pin(output);
    wgmma_fence();
    issue_pv(p_even, stage.index);
    wgmma_wait<0>();
    pin(output);

    u16* out = out_gmem + (bh / heads) * out_stride_b + (bh % heads) * out_stride_h;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float inverse = 1.f / sum_over_row(row_sum[r]);
      const int row = first_query_row(q_tile) + 8 * r;
      if (row < s_q) {
        u16* out_row = out + row * out_stride_s + column();
#pragma unroll
        for (int n = 0; n < 16; n++)
          *reinterpret_cast<u32*>(out_row + 8 * n) =
              pack_output<OUT_HALF>(output[4 * n + 2 * r] * inverse, output[4 * n + 2 * r + 1] * inverse);
      }
    }
  }
  cluster_sync();  // shared memory must outlive the loads and signals of the other block
}
