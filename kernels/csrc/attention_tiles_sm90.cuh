// What the two attention kernels for Hopper have in common: tiles, the ring of stages, loads, who has which rows, Q K^T.
//
// One block: 128 query rows of one head. Two blocks of a cluster (neighbouring query tiles) share the loads of K and V.
//   warpgroup 0: producer, one thread issues TMA.  Warpgroups 1 and 2: consumers, 64 query rows each.
// Run-time sizes are scalar for a block.
#pragma once
#include "common_sm90.cuh"

constexpr int HEAD_DIM = 128;
constexpr int BLOCK_Q = 128;
constexpr int BLOCK_KV = 128;
constexpr int STAGES = 4;
constexpr int CLUSTER = 2;  // 4 leaves SMs idle: GPCs do not divide by it
constexpr int THREADS = 384;

constexpr int Q_BYTES = BLOCK_Q * HEAD_DIM;
constexpr int K_BYTES = BLOCK_KV * HEAD_DIM;

// Swizzled tiles start at multiples of 1024. A kernel reserves 1023 bytes more than it needs for the way there.
DEVICE char* first_tile(char* shared) { return reinterpret_cast<char*>((reinterpret_cast<u64>(shared) + 1023) & ~1023ull); }

// Barriers of the ring. Stage t holds one pair {K tile p, V tile p - 1} with p % STAGES == t: what one step of a consumer needs.
struct StageBarriers {
  static constexpr int COUNT = 2 * STAGES;
  u32 base_smem;
  DEVICE u32 full(int stage) const { return base_smem + 8 * stage; }
  DEVICE u32 empty(int stage) const { return base_smem + 8 * (STAGES + stage); }

  DEVICE void init_stages() const {
    for (int s = 0; s < STAGES; s++) {
      mbarrier_init(full(s), 1);
      mbarrier_init(empty(s), 2 * CLUSTER);  // both consumer warpgroups of every block that the stage's halves go to
    }
  }
};

// A query tile to `rows_smem`, 64 rows for each consumer.
DEVICE void load_query_tile(u32 rows_smem, const TensorMap* map, int q_tile, int bh, u32 full_smem) {
  mbarrier_expect_bytes(full_smem, Q_BYTES);
  for (int half = 0; half < 2; half++)
    tma_load_3d(rows_smem + half * 64 * HEAD_DIM, map, 0, q_tile * BLOCK_Q + half * 64, bh, full_smem);
}

// The block's half of K tile number `tile`, to both blocks.
DEVICE void load_key_tile(u32 tile_smem, const TensorMap* map, int tile, int bh, u32 rank, u32 full_smem) {
  const u16 everyone = (1 << CLUSTER) - 1;
  tma_load_3d_multicast(tile_smem + rank * (K_BYTES / CLUSTER), map, 0, tile * BLOCK_KV + rank * (BLOCK_KV / CLUSTER), bh, full_smem,
                        everyone);
}

// The consumer thread's query rows are this and + 8. Computed where it is used: over the loop it would cost a register.
DEVICE int first_query_row(int q_tile) {
  const int index = static_cast<int>(thread_index()) - 128;
  return q_tile * BLOCK_Q + index / 32 * 16 + index % 32 / 4;
}

// scores = (started ? scores : 0) + q8 k8^T, s32. scores[i] of a thread: query row (i & 2 ? +8 : +0), key 8 * (i / 4) + 2 * (lane % 4)
// + (i & 1).
DEVICE void issue_query_key(u32 (&scores)[64], const u32 (&q_rmem)[16], u64 k_descriptor, int stage, bool started) {
#pragma unroll
  for (int k = 0; k < 4; k++)
    wgmma_m64n128k32_s8(scores, q_rmem[4 * k], q_rmem[4 * k + 1], q_rmem[4 * k + 2], q_rmem[4 * k + 3],
                        k_descriptor + static_cast<u64>(stage * (K_BYTES / 16) + 2 * k), k > 0 || started);
  wgmma_commit();
}
