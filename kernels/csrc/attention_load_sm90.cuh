// Shared memory of the 8-bit attention kernel, its barriers, and the producer that fills it.
#pragma once
#include "attention_schedule_sm90.cuh"

constexpr int GROUP = 16;                 // tiles accumulated in the tensor cores between two flushes = slots of one mean product
constexpr int CONSUMERS = 256;
constexpr int SHARED_BYTES = 190 * 1024;  // attend/cuda.py reserves this

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
