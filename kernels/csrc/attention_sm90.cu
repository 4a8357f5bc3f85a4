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

#include "attention_codes_sm90.cuh"
#include "attention_combine_sm90.cuh"
#include "attention_flushed_sm90.cuh"
#include "attention_load_sm90.cuh"
#include "attention_row_sums_sm90.cuh"

// Writes a thread's outputs of one row, packed by `pack`: channels 8 n and 8 n + 1 from `out_row_gmem` on, for n < 16.
template <class Pack>
DEVICE void store_row(u16* out_row_gmem, const float (&residual)[68], int r, float inverse, Pack pack) {
#pragma unroll
  for (int n = 0; n < 16; n++) {
    const int i = 4 * n + 2 * r;
    *reinterpret_cast<u32*>(out_row_gmem + 8 * n) = pack(n, residual[i] * inverse, residual[i + 1] * inverse);
  }
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
    Flushed flushed{base_smem + Smem::OUT};
    RowSums sums;
    // Groups of four tiles since the last flush. What lies before a part in its first group of means has row sums of zero.
    int quads = item.first_tile % GROUP / STAGES;
    int group = 0;                      // of the means to be restored next
    bool residual_empty = true;
    flushed.clear();
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
      wgmma_m64n128k16_f32_f16(residual, sums.of_group[0], sums.of_group[1], sums.of_group[2], sums.of_group[3],
                               matrix_descriptor<32>(base_smem + Smem::MEAN + (group & 1) * MEANS_BYTES));
      wgmma_commit();
    };
    auto wait_means = [&]() { mbarrier_wait(barriers.means_full(group & 1), (group >> 1) & 1); };
    auto release = [&](int stage) {
      if (thread < CLUSTER) mbarrier_arrive_cluster(barriers.empty(stage), thread);
    };

    // Scales everything accumulated under the offsets (row, row + 8) to the present ones.
    auto scale_accumulated = [&](u32 old_offsets) {
      const int old[2] = {signed_low_16(old_offsets), signed_high_16(old_offsets)};
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        factor[r] = exp2_approx(static_cast<float>(signed_low_16(rows[r].offset) - old[r]) * half_low(rows[r].scale) * .125f);
        sums.of_row[r] *= factor[r];
        flushed.factor[r] *= factor[r];
      }
#pragma unroll
      for (int i = 0; i < 68; i++) residual[i] *= factor[(i >> 1) & 1];
      sums.scale_group(factor);
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
        raise_maximum(rows, scores, false);
        pin(scores);
        scores_to_codes(codes, scores, rows);
      }
      wgmma_wait<0>();
      pin(residual);
    };
    auto scale_if_raised = [&]() {
      if (raised) scale_accumulated(old_offsets);
    };

    auto collect_sums = [&]() {
      sums.collect(residual);
      quads++;
    };
    auto flush = [&]() {
      pin(residual);
      residual_empty = true;
      flushed.add(residual, sums.of_row);
      quads = 0;
    };
    auto release_means = [&]() {
      if (thread == 0) mbarrier_arrive(barriers.means_empty(group & 1));
      group++;
    };
    auto restore_means = [&]() {
      wait_means();
      pin(residual);
      pin(sums.of_group);
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
    // Here, so that the scales arrive while the product runs.
#pragma unroll
    for (int r = 0; r < 2; r++) rows[r].start(scale[r]);
    wgmma_wait<0>();
    pin(scores);
    release(0);
    raise_maximum(rows, scores, tiles > SHORT_TILES);
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
          pin(sums.of_group);
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
      sums.push(0u);
      quads++;
    }
    if (MEANS) restore_means();
    if (consumer == 0) named_barrier_sync<CONSUMERS>(1);  // takes the turn passed last, so that the barrier ends empty

    flushed.add_to(residual);  // the last products are not flushed themselves
    u16* out = out_gmem + (item.bh / heads) * out_stride_b + (item.bh % heads) * out_stride_h;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float sum = sum_over_row(sums.of_row[r]), inverse = 1.f / sum;
      const int row = first_query_row(item.q_tile) + 8 * r;
      if (item.part >= 0) {
        const int part_row = item.part_row(first_query_row(0) + 8 * r);
        store_row(schedule.part_out_gmem + static_cast<i64>(part_row) * HEAD_DIM + column, residual, r, inverse,
                  [](int, float low, float high) { return pack_half(low, high); });
        if (column == 0) schedule.part_row_gmem[part_row] = {sum, signed_low_16(rows[r].offset)};
      } else if (row < s_q) {
        store_row(out + row * out_stride_s + column, residual, r, inverse, [&](int n, float low, float high) {
          return pack_output<OUT_HALF>(low * v_scale[n].x, high * v_scale[n].y);
        });
      }
    }
  }
  cluster_sync();  // shared memory must outlive the loads and signals of the other block
}
