// Which cluster of the 8-bit attention kernel works on what: a pair of neighbouring query tiles of one head, with all keys or with a
// part of them (split KV).
//
// Pairs with all keys come first. A last round of them would leave clusters idle, so its pairs may be split along the keys
// (attend/tile_schedule.py): every part of a pair but its last has `part_tiles` tiles. First come all first parts, then all second
// ones, so that the short ones are last. attention_combine_kernel puts the parts of a row together.
#pragma once
#include "attention_tiles_sm90.cuh"

struct PartRow {
  float row_sum;
  int offset;  // RowCodes::offset: the sum counts units of 2^(-offset * q_scale / 8)
};

struct TileSchedule {
  int q_tile_pairs;        // of a head
  int whole_pairs;         // the first ones; the other pairs are split
  int split_pairs;
  int part_tiles;          // a multiple of STAGES
  u16* part_out_gmem;      // [parts of all pairs, CLUSTER * 128, 128] half: outputs in units of v_scale
  PartRow* part_row_gmem;  // [parts of all pairs, CLUSTER * 128]
};
static_assert(sizeof(TileSchedule) == 32, "as in attend/cuda.py");

// What this block works on.
struct Item {
  int q_tile, bh;
  int part = -1;  // among the parts of all pairs; -1: all keys
  int first_tile = 0, keys;

  DEVICE Item(const TileSchedule& schedule, int s_kv) : keys(s_kv) {
    int pair = block_index() / CLUSTER;
    if (pair >= schedule.whole_pairs) {
      part = pair - schedule.whole_pairs;
      pair = schedule.whole_pairs + part % schedule.split_pairs;
      first_tile = part / schedule.split_pairs * schedule.part_tiles;
      keys = min(s_kv - first_tile * BLOCK_KV, schedule.part_tiles * BLOCK_KV);
    }
    bh = pair / schedule.q_tile_pairs;
    q_tile = pair % schedule.q_tile_pairs * CLUSTER + cluster_rank();
  }
  DEVICE int tiles() const { return (keys + BLOCK_KV - 1) / BLOCK_KV; }

  // Number of a row of the block's query tile among the rows of all parts.
  DEVICE int part_row(int row) const { return (part * CLUSTER + cluster_rank()) * BLOCK_Q + row; }
};
