// V-Smooth grouping for Hopper (sm_90a): k-means over the value vectors of each (batch, head), then a stable counting sort.
// Plain version: group/reference.py.
//
// Semantics. A round looks at every `step`-th token, gives it to the nearest centroid and replaces each centroid by the mean of its
// tokens. The last pass gives every token to a centroid; the permutation lists tokens by cluster, inside a cluster in their order.
// The host is never waited for, and no sum depends on the order of atomics: two runs give the same bits.
//
// Launches (one-dimensional grids, group/cuda.py makes them): init, then rounds of assign, scan, scatter, segment_sum, update; at a
// cold start distances and chain; at last assign, scan, scatter over all tokens. Each but the first is brought in while the one
// before still runs (programmatic dependent launch) and begins by waiting for it.
//   init         warp = one centroid: the previous one or the value of a token, tokens at equal spacing.
//   assign       block = one chunk of tokens of one head, warpgroup = 64 tokens at a time: label = argmax (v.c - |c|^2 / 2) with c
//                rounded to the input type (wgmma, FP32 sums, the smaller label wins a tie); tokens of the chunk per cluster.
//   assign_wide  the same for over 256 clusters, whose centroids fill the shared memory of an SM.
//   scan         block = one head: first position of every (cluster, chunk).
//   scatter      block = one chunk: stable positions inside the chunk, which are the permutation.
//   segment_sum  warp = SEGMENT sorted positions: sums of the runs of equal labels.
//   update       block = one cluster: its sums in a fixed order, divided by its size.
//   distances    warp = 16 x 64 pairs of centroids of one head (mma.sync).
//   chain        block = one head: renumbers the centroids along a greedy chain of nearest neighbours, beginning with the longest.
//                Neighbours share a mixed 128-token block. A later warm start inherits the numbers and needs no chain of its own.
//
// Requires sm_90a, C <= MOST_CLUSTERS and rows of HEAD_DIM contiguous elements that start at multiples of VEC bytes.
// Switches: -DINPUT_FP16=1 takes half instead of bfloat16, -DVEC=16, 8, 4 or 2 is the alignment of the rows.
#include "strided_sm90.cuh"

constexpr int SEGMENT = 32;  // sorted positions per warp of segment_sum: a short sequence needs the warps
constexpr int MOST_CLUSTERS = 512;
constexpr int WARPS = 4;              // per block of init, segment_sum, update and distances
constexpr int SCATTER_WARPS = 8;      // per block of scatter
constexpr int PRODUCT_TOKENS = 64;    // of one wgmma of assign
constexpr int PRODUCT_CLUSTERS = 64;  // of one wgmma of assign
constexpr u32 EVERY_LANE = ~0u;

// Sample i of a head is its token i * step. Shapes in brackets, BH = B * H.
struct Params {
  const u16* v;  // [B, H, S, HEAD_DIM], strides in elements, last one 1
  i64 v_b, v_h, v_s;
  const float* previous;  // [BH, C, HEAD_DIM] or null: cold start
  float* centroids;       // [BH, C, HEAD_DIM]
  u16* rounded;           // [BH, C, HEAD_DIM], input type
  float* half_norm;       // [BH, C], half the squared length of the rounded centroid
  u16* labels;            // [BH, n], cluster of each sample
  int* histogram;         // [BH, chunks, C], samples; scan turns them into those of the chunks before
  int* start;             // [BH, C], first sorted position of the cluster
  int* count;             // [BH, C], samples of the cluster
  int* permutation;       // [BH, n], sorted position -> sample
  float* partial;         // [BH, slots, HEAD_DIM], sums of runs, see segment_sum
  float* distances;       // [BH, C, C], half the squared distance of two rounded centroids; only at a cold start
  int B, H, S, C;
  int n, step;        // samples of a head
  int chunk, chunks;  // samples per block of assign and scatter, blocks per head
  int segments;       // of SEGMENT samples
  int slots;          // segments + C
  int heads_first;    // 1: neighbouring blocks take neighbouring heads
};
static_assert(sizeof(Params) == 168, "group/cuda.py mirrors this structure");

// Values of one head.
DEVICE const u16* head_start(const Params& params, u32 bh) {
  const u32 batch = bh / params.H;
  return params.v + static_cast<i64>(batch) * params.v_b + static_cast<i64>(bh - batch * params.H) * params.v_h;
}

DEVICE float minus_infinity() { return __int_as_float(0xff800000); }

// In elements, from the head's start.
DEVICE i64 sample_offset(const Params& params, int sample) { return static_cast<i64>(sample) * params.step * params.v_s; }

// ---- init: the first centroids ------------------------------------------------------------------------------------------------

// Centroid bh * C + cluster, of which a lane has channels 4 lane .. 4 lane + 3: as it is, rounded, and half its squared length.
DEVICE void store_centroid(const Params& params, u64 centroid, const float (&channels)[4]) {
  u16 rounded[4];
  float norm = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    rounded[i] = float_to_input(channels[i]);
    const float x = input_to_float(rounded[i]);
    norm = fmaf(x, x, norm);
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) norm += __shfl_xor_sync(EVERY_LANE, norm, mask);

  const u64 first = centroid * HEAD_DIM + 4 * lane_id();
  store_as(params.centroids + first, make_float4(channels[0], channels[1], channels[2], channels[3]));
  store_as(params.rounded + first, make_uint2(pack_16(rounded[0], rounded[1]), pack_16(rounded[2], rounded[3])));
  if (lane_id() == 0) params.half_norm[centroid] = 0.5f * norm;
}

// Where `cluster` starts cold: the first token is that of cluster 0, the last that of cluster C - 1.
DEVICE i64 spaced_token(const Params& params, u32 cluster) {
  return params.C > 1 ? static_cast<i64>(cluster) * (params.S - 1) / (params.C - 1) : 0;
}

// Four channels of a lane, of a centroid or a token.
DEVICE void load_floats(float (&channels)[4], const float* address_gmem) {
  const float4 four = load_as<float4>(address_gmem);
  channels[0] = four.x;
  channels[1] = four.y;
  channels[2] = four.z;
  channels[3] = four.w;
}

DEVICE void load_inputs(float (&channels)[4], const u16* address_gmem) {
  u32 pairs[2];
  load_channels<false>(pairs, address_gmem);
  channels[0] = input_low(pairs[0]);
  channels[1] = input_high(pairs[0]);
  channels[2] = input_low(pairs[1]);
  channels[3] = input_high(pairs[1]);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) init(const __grid_constant__ Params params) {
  wait_for_previous();
  const u32 centroid = blockIdx.x * WARPS + warp_id(), lane = lane_id();
  if (centroid >= static_cast<u32>(params.B) * params.H * params.C) return;
  const u32 bh = centroid / params.C, cluster = centroid - bh * params.C;
  float channels[4];
  if (params.previous) {
    load_floats(channels, params.previous + static_cast<u64>(centroid) * HEAD_DIM + 4 * lane);
  } else {
    const i64 token = spaced_token(params, cluster);
    load_inputs(channels, head_start(params, bh) + token * params.v_s + 4 * lane);
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (!is_finite(channels[i])) channels[i] = 0.f;  // a NaN would stay for ever: its cluster never gets a token
  store_centroid(params, centroid, channels);
}

// ---- assign: labels and their histogram ---------------------------------------------------------------------------------------

// d[64 x 64] (FP32) += a[64 x 16] b[64 x 16]^T, both of the input type, a in registers.
DEVICE void wgmma_m64n64k16(float (&d_rmem)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b_descriptor) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." INPUT_TYPE "." INPUT_TYPE " {" PTX_32
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
               : INOUT_32("+f", d_rmem, 0)
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_descriptor));
}

// Shared memory of a block of assign. A padding row is zero and starts at minus infinity.
struct AssignSmem {
  int rows;             // C rounded up to whole products
  u8* planes;           // two of 64 channels each, [rows][128 bytes] with the 128-byte swizzle
  float* start_scores;  // [rows], -|c|^2 / 2
  int* counts;          // [rows], tokens

  DEVICE AssignSmem(u8* shared, int clusters) {
    planes = shared + (-static_cast<u32>(__cvta_generic_to_shared(shared)) & 1023);  // swizzled rows start at a multiple of 1024
    rows = (clusters + PRODUCT_CLUSTERS - 1) & -PRODUCT_CLUSTERS;
    start_scores = reinterpret_cast<float*>(planes + 2 * plane_bytes());
    counts = reinterpret_cast<int*>(start_scores + rows);
  }
  DEVICE int plane_bytes() const { return rows * 128; }
};

// A thread loads a token in pieces of 16 bytes: load j of the one with place c in its quad is four pairs of channels, from
// 32 j + 8 c on. An A fragment takes pairs that lie 16 bytes apart. So the centroids' channels are stored in another order: pair w of
// (j, c) as pair c of the w-th 16 bytes of the j-th 64.
template <int THREADS>
DEVICE void load_centroids(const AssignSmem& smem, const Params& params, u32 bh) {
  for (int i = threadIdx.x; i < smem.rows * 16; i += THREADS) {
    const int row = i >> 4, load = (i >> 2) & 3, place = i & 3;
    const u64 first = (static_cast<u64>(bh) * params.C + row) * HEAD_DIM + 32 * load + 8 * place;
    const uint4 pairs = row < params.C ? load_as<uint4>(params.rounded + first) : make_uint4(0, 0, 0, 0);
    u8* target = smem.planes + (load >> 1) * smem.plane_bytes() + row * 128 + 4 * place;
    auto store = [&](int word, u32 pair) { store_as(target + 16 * ((4 * (load & 1) + word) ^ (row & 7)), pair); };
    store(0, pairs.x);
    store(1, pairs.y);
    store(2, pairs.z);
    store(3, pairs.w);
  }
  for (int row = threadIdx.x; row < smem.rows; row += THREADS) {
    smem.start_scores[row] = row < params.C ? -params.half_norm[static_cast<u64>(bh) * params.C + row] : minus_infinity();
    smem.counts[row] = 0;
  }
}

// Scores of 64 tokens against 64 clusters. scores[i] of a thread: token (i & 2 ? +8 : +0), cluster 8 * (i / 4) + 2 * place + i % 2.
// One accumulator: the other warpgroups of the SM keep the tensor cores busy meanwhile (two do not fit in 128 registers).
DEVICE void score(float (&scores)[32], const u32 (&tokens)[2][4][4], const AssignSmem& smem, u64 centroids, int product,
                  int place) {
  const float* start_scores = smem.start_scores + PRODUCT_CLUSTERS * product + 2 * place;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float2 start = load_as<float2>(start_scores + 8 * i);
    scores[4 * i] = scores[4 * i + 2] = start.x;
    scores[4 * i + 1] = scores[4 * i + 3] = start.y;
  }
  pin(scores);
  wgmma_fence();
#pragma unroll
  for (int load = 0; load < 4; load++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int offset = (load >> 1) * smem.plane_bytes() + product * PRODUCT_CLUSTERS * 128 + (2 * (load & 1) + half) * 32;
      wgmma_m64n64k16(scores, tokens[0][load][2 * half], tokens[1][load][2 * half], tokens[0][load][2 * half + 1],
                      tokens[1][load][2 * half + 1], centroids + offset / 16);
    }
  wgmma_commit();
  wgmma_wait<0>();
  pin(scores);
}

struct Best {
  int label;  // of the thread with place 0 in a quad, until pick_among_quad
  float score;
};

// Takes over what is better among a thread's scores of `product`; the smaller label wins a tie.
DEVICE void pick(Best (&best)[2], const float (&scores)[32], int product) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float top = scores[2 * r];
    int column = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int odd = 0; odd < 2; odd++)
        if (i + odd > 0) {
          const float next = scores[4 * i + 2 * r + odd];
          column = next > top ? 8 * i + odd : column;
          top = fmaxf(next, top);
        }
    if (top > best[r].score) best[r] = {PRODUCT_CLUSTERS * product + column, top};
  }
}

// The best of the four threads that share a token; the smaller label wins a tie.
DEVICE void pick_among_quad(Best& best, int place) {
  best.label += 2 * place;
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) {
    const float score = __shfl_xor_sync(EVERY_LANE, best.score, mask);
    const int label = __shfl_xor_sync(EVERY_LANE, best.label, mask);
    if (score > best.score || (score == best.score && label < best.label)) best = {label, score};
  }
}

// tokens[r][load]: 16 bytes of sample + 8 r. What lies past the last one is the last one again.
DEVICE void load_tokens(u32 (&tokens)[2][4][4], const Params& params, const u16* head_gmem, int sample) {
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int load = 0; load < 4; load++)
      load_channels(tokens[r][load], head_gmem + sample_offset(params, min(sample + 8 * r, params.n - 1)) + 32 * load);
}

template <int THREADS>
DEVICE void assign_chunk(const Params& params) {
  extern __shared__ u8 shared[];
  const AssignSmem smem(shared, params.C);
  const Part part = part_of_block(blockIdx.x, params.chunks, params.B * params.H, params.heads_first);
  const u32 bh = part.bh, chunk = part.index;
  load_centroids<THREADS>(smem, params, bh);
  fence_async_proxy();
  __syncthreads();

  const u64 centroids = matrix_descriptor<128>(smem_address(smem.planes));
  const int row = lane_id() >> 2, place = lane_id() & 3;
  const u16* v = head_start(params, bh) + 8 * place;
  const int end = min(static_cast<int>(chunk + 1) * params.chunk, params.n), warp = warp_id();
  for (int first = chunk * params.chunk + (warp >> 2) * PRODUCT_TOKENS; first < end; first += THREADS / 128 * PRODUCT_TOKENS) {
    const int sample = first + 16 * (warp & 3) + row;  // the thread's samples are this and + 8
    u32 tokens[2][4][4];
    load_tokens(tokens, params, v, sample);

    Best best[2] = {{0, minus_infinity()}, {0, minus_infinity()}};
    float scores[32];
#pragma unroll 1
    for (int product = 0; PRODUCT_CLUSTERS * product < smem.rows; product++) {
      score(scores, tokens, smem, centroids, product, place);
      pick(best, scores, product);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      pick_among_quad(best[r], place);
      const int label = best[r].label < params.C ? best[r].label : 0;  // NaN, or every score minus infinity: any cluster will do
      if (place == r && sample + 8 * r < end) {
        params.labels[static_cast<u64>(bh) * params.n + sample + 8 * r] = label;
        atomicAdd(smem.counts + label, 1);
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < params.C; i += THREADS)
    params.histogram[(static_cast<u64>(bh) * params.chunks + chunk) * params.C + i] = smem.counts[i];
}

extern "C" __global__ void __launch_bounds__(256, 2) assign(const __grid_constant__ Params params) {
  wait_for_previous();
  assign_chunk<256>(params);
}

extern "C" __global__ void __launch_bounds__(512, 1) assign_wide(const __grid_constant__ Params params) {
  wait_for_previous();
  assign_chunk<512>(params);
}

// ---- scan and scatter: the counting sort --------------------------------------------------------------------------------------

// Replaces the counts of one cluster in every chunk of a head by the sums of the chunks before; returns the sum of all.
DEVICE int scan_chunks(const Params& params, int* counts_gmem) {
  constexpr int BATCH = 8;  // loads in flight
  int sum = 0, chunk = 0;
  for (; chunk + BATCH <= params.chunks; chunk += BATCH) {
    int counts[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) counts[i] = counts_gmem[static_cast<u64>(chunk + i) * params.C];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      counts_gmem[static_cast<u64>(chunk + i) * params.C] = sum;
      sum += counts[i];
    }
  }
  for (; chunk < params.chunks; chunk++) {
    const int count = counts_gmem[static_cast<u64>(chunk) * params.C];
    counts_gmem[static_cast<u64>(chunk) * params.C] = sum;
    sum += count;
  }
  return sum;
}

// Over the threads of the block, up to this one.
DEVICE int inclusive_block_sum(int value, int thread, int lane) {
  __shared__ int warp_sums[MOST_CLUSTERS / 32];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(EVERY_LANE, value, distance);
    if (lane >= distance) value += before;
  }
  if (lane == 31) warp_sums[thread >> 5] = value;
  __syncthreads();
  for (int i = 0; i < (thread >> 5); i++) value += warp_sums[i];
  return value;
}

// A thread has one cluster.
extern "C" __global__ void __launch_bounds__(MOST_CLUSTERS) scan(const __grid_constant__ Params params) {
  wait_for_previous();
  const int cluster = threadIdx.x, lane = lane_id();
  const u64 bh = blockIdx.x;
  int count = 0;
  if (cluster < params.C) {
    count = scan_chunks(params, params.histogram + bh * params.chunks * params.C + cluster);
    params.count[bh * params.C + cluster] = count;
  }
  const int end = inclusive_block_sum(count, cluster, lane);
  if (cluster < params.C) params.start[bh * params.C + cluster] = end - count;
}

constexpr int NO_LABEL = 0xffff;  // of lanes past the end, which take part all the same

// Sets the label of the lane's sample; returns its peers, the lanes with the same label.
DEVICE u32 match_labels(int& label, const u16* labels_gmem, int sample, int end) {
  label = sample < end ? labels_gmem[sample] : NO_LABEL;
  return __match_any_sync(EVERY_LANE, label);
}

// Adds the peers to the entry of their label: the lowest of them does.
DEVICE void add_peers(int* entries_smem, int label, u32 peers, int lane) {
  if (label != NO_LABEL && __ffs(peers) - 1 == lane) entries_smem[label] += __popc(peers);
}

// Of a warp's samples, `begin` to `end`.
DEVICE void count_labels(int* counts_smem, const u16* labels_gmem, int begin, int end, int lane) {
  for (int first = begin; first < end; first += 32) {
    int label;
    const u32 peers = match_labels(label, labels_gmem, first + lane, end);
    add_peers(counts_smem, label, peers, lane);
    __syncwarp();
  }
}

// [SCATTER_WARPS][C]: counts of each warp -> its first sorted position of each cluster.
DEVICE void counts_to_positions(int* entries_smem, const Params& params, u32 bh, u32 chunk) {
  for (int cluster = threadIdx.x; cluster < params.C; cluster += 32 * SCATTER_WARPS) {
    int position = params.start[static_cast<u64>(bh) * params.C + cluster] +
                   params.histogram[(static_cast<u64>(bh) * params.chunks + chunk) * params.C + cluster];
#pragma unroll
    for (int i = 0; i < SCATTER_WARPS; i++) {
      const int count = entries_smem[i * params.C + cluster];
      entries_smem[i * params.C + cluster] = position;
      position += count;
    }
  }
}

// Of a warp's samples, `begin` to `end`. Stable: lanes are in the order of samples.
DEVICE void write_permutation(const Params& params, u32 bh, int* positions_smem, const u16* labels_gmem, int begin, int end,
                              int lane) {
  for (int first = begin; first < end; first += 32) {
    int label;
    const u32 peers = match_labels(label, labels_gmem, first + lane, end);
    if (label != NO_LABEL) {
      const u64 position = static_cast<u64>(bh) * params.n + positions_smem[label] + __popc(peers & ((1u << lane) - 1));
      params.permutation[position] = first + lane;
    }
    __syncwarp();  // every position is read before it moves on
    add_peers(positions_smem, label, peers, lane);
    __syncwarp();
  }
}

extern "C" __global__ void __launch_bounds__(32 * SCATTER_WARPS) scatter(const __grid_constant__ Params params) {
  wait_for_previous();
  extern __shared__ int entries[];  // [SCATTER_WARPS][C]
  const int warp = warp_id(), lane = lane_id();
  const Part part = part_of_block(blockIdx.x, params.chunks, params.B * params.H, params.heads_first);
  const u32 bh = part.bh, chunk = part.index;
  for (int i = threadIdx.x; i < SCATTER_WARPS * params.C; i += 32 * SCATTER_WARPS) entries[i] = 0;
  __syncthreads();

  const u16* labels = params.labels + static_cast<u64>(bh) * params.n;
  int* warp_entries = entries + warp * params.C;
  const int samples_per_warp = params.chunk / SCATTER_WARPS;
  const int begin = chunk * params.chunk + warp * samples_per_warp, end = min(begin + samples_per_warp, params.n);
  count_labels(warp_entries, labels, begin, end, lane);
  __syncthreads();
  counts_to_positions(entries, params, bh, chunk);
  __syncthreads();
  write_permutation(params, bh, warp_entries, labels, begin, end, lane);
}

// ---- segment_sum and update: new centroids ------------------------------------------------------------------------------------

// Four channels of a token.
DEVICE void add(float (&sum)[4], const u32 (&pairs)[2]) {
  sum[0] += input_low(pairs[0]);
  sum[1] += input_high(pairs[0]);
  sum[2] += input_low(pairs[1]);
  sum[3] += input_high(pairs[1]);
}

// Run (segment, cluster) goes to slot segment + cluster, which is unique because both only grow along the sorted order. A lane has
// four channels.
extern "C" __global__ void __launch_bounds__(32 * WARPS) segment_sum(const __grid_constant__ Params params) {
  wait_for_previous();
  constexpr int BATCH = 16;  // loads in flight
  const u32 index = blockIdx.x * WARPS + warp_id(), lane = lane_id();
  if (index >= static_cast<u32>(params.B) * params.H * params.segments) return;
  const u32 bh = index / params.segments, segment = index - bh * params.segments;
  const u16* v = head_start(params, bh) + 4 * lane;
  const int begin = segment * SEGMENT, end = min(begin + SEGMENT, params.n);
  const int* permutation = params.permutation + static_cast<u64>(bh) * params.n;
  const u16* labels = params.labels + static_cast<u64>(bh) * params.n;

  float sum[4] = {0.f, 0.f, 0.f, 0.f};
  int cluster = -1;  // none yet
  auto store_run = [&]() {
    if (cluster >= 0)
      store_as(params.partial + (static_cast<u64>(bh) * params.slots + segment + cluster) * HEAD_DIM + 4 * lane,
                   make_float4(sum[0], sum[1], sum[2], sum[3]));
  };
  for (int first = begin; first < end; first += 32) {
    const int sample = permutation[min(first + static_cast<int>(lane), params.n - 1)], label = labels[sample];
#pragma unroll
    for (int batch = 0; batch < 32; batch += BATCH) {
      u32 pairs[BATCH][2];
#pragma unroll
      for (int i = 0; i < BATCH; i++)
        load_channels<false>(pairs[i], v + sample_offset(params, __shfl_sync(EVERY_LANE, sample, batch + i)));
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int next = __shfl_sync(EVERY_LANE, label, batch + i);
        if (first + batch + i < end) {
          if (next != cluster) {
            store_run();
            cluster = next;
            sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
          }
          add(sum, pairs[i]);
        }
      }
    }
  }
  store_run();
}

DEVICE void add(float4& sum, const float4& x) {
  sum.x += x.x;
  sum.y += x.y;
  sum.z += x.z;
  sum.w += x.w;
}

// The warps take turns at the segments; the first adds up their sums. An empty cluster keeps its centroid, and so does one whose
// mean is not finite.
extern "C" __global__ void __launch_bounds__(32 * WARPS) update(const __grid_constant__ Params params) {
  wait_for_previous();
  __shared__ float4 warp_sums[WARPS][32];
  const u32 centroid = blockIdx.x, warp = warp_id(), lane = lane_id();
  const u32 bh = centroid / params.C, cluster = centroid - bh * params.C;
  const int count = params.count[centroid], first = params.start[centroid];
  if (count == 0) return;
  const int first_segment = first / SEGMENT, last_segment = (first + count - 1) / SEGMENT;
  const float* partial = params.partial + (static_cast<u64>(bh) * params.slots + cluster) * HEAD_DIM + 4 * lane;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
  for (int segment = first_segment + warp; segment <= last_segment; segment += WARPS)
    add(sum, load_as<float4>(partial + static_cast<u64>(segment) * HEAD_DIM));
  warp_sums[warp][lane] = sum;
  __syncthreads();
  if (warp) return;

#pragma unroll
  for (int i = 1; i < WARPS; i++) add(sum, warp_sums[i][lane]);
  const float inverse = 1.f / static_cast<float>(count);
  const float mean[4] = {sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse};
  bool all_finite = true;
#pragma unroll
  for (int i = 0; i < 4; i++) all_finite &= is_finite(mean[i]);
  if (__all_sync(EVERY_LANE, all_finite)) store_centroid(params, centroid, mean);
}

// ---- distances and chain: the order of the clusters ---------------------------------------------------------------------------

// d[16 x 8] (FP32) += a[16 x 16] b[8 x 16]^T, both of the input type.
DEVICE void mma_m16n8k16(float (&d_rmem)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." INPUT_TYPE "." INPUT_TYPE
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : INOUT_4("+f", d_rmem, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) distances(const __grid_constant__ Params params) {
  wait_for_previous();
  constexpr int ROWS = 16, COLUMNS = 64;
  const u32 tiles_y = (params.C + ROWS - 1) / ROWS, tiles_x = (params.C + COLUMNS - 1) / COLUMNS;
  const u32 index = blockIdx.x * WARPS + warp_id();
  if (index >= static_cast<u32>(params.B) * params.H * tiles_y * tiles_x) return;
  const u32 bh = index / (tiles_y * tiles_x), tile = index - bh * (tiles_y * tiles_x);
  const u32 group = lane_id() >> 2, place = lane_id() & 3;
  const int first_row = ROWS * (tile / tiles_x), first_column = COLUMNS * (tile % tiles_x);
  const float* half_norm = params.half_norm + static_cast<u64>(bh) * params.C;
  // Two channels of a centroid, as a fragment has them.
  auto pair = [&](int cluster, int channel) {
    const u64 row = static_cast<u64>(bh) * params.C + min(cluster, params.C - 1);
    return load_as<u32>(params.rounded + row * HEAD_DIM + channel + 2 * place);
  };
  u32 rows_rmem[HEAD_DIM / 16][4];
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) rows_rmem[k][i] = pair(first_row + group + 8 * (i & 1), 16 * k + 8 * (i >> 1));

  for (int column = first_column; column < min(first_column + COLUMNS, params.C); column += 8) {
    float products[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++)
      mma_m16n8k16(products, rows_rmem[k], pair(column + group, 16 * k), pair(column + group, 16 * k + 8));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int y = first_row + group + 8 * (i >> 1), x = column + 2 * place + (i & 1);
      if (y < params.C && x < params.C)
        params.distances[(static_cast<u64>(bh) * params.C + y) * params.C + x] =
            fmaxf((half_norm[y] + half_norm[x]) - products[i], 0.f);
    }
  }
}

// The walk along the chain. A lane has N centroids: lane, lane + 32 and so on, each with a key; the smallest key is the next step.
// Keys are the bits of non-negative floats, which sort as integers.
constexpr u32 NO_KEY = ~0u;  // above every key: has a place already

// Of all values of the warp. Overwrites them.
template <int N>
DEVICE u32 warp_minimum(u32 (&values)[N]) {
#pragma unroll
  for (int stride = N / 2; stride; stride /= 2)
#pragma unroll
    for (int i = 0; i < stride; i++) values[i] = min(values[i], values[i + stride]);
  return __reduce_min_sync(EVERY_LANE, values[0]);
}

// Of several with this key the first.
template <int N>
DEVICE u32 centroid_of(u32 key, const u32 (&keys)[N], u32 lane) {
  u32 hits = 0;
#pragma unroll
  for (int i = 0; i < N; i++) hits |= keys[i] == key ? 1u << i : 0u;
  return __reduce_min_sync(EVERY_LANE, hits ? 32 * (__ffs(hits) - 1) + lane : NO_KEY);
}

// One warp: place_smem[centroid] = its position in the chain. A step costs it one load, from L2.
template <int N>
DEVICE void walk(const Params& params, u64 bh, u16* place_smem) {
  constexpr u32 LONGEST = 0x7f800000u;  // minus the bits of a length: the key of the first step
  const u32 lane = lane_id();
  u32 keys[N], waiting = 0;  // bit i: centroid 32 i + lane has no place yet
#pragma unroll
  for (int i = 0; i < N; i++) {
    const bool live = 32 * i + static_cast<int>(lane) < params.C;
    if (live) waiting |= 1u << i;
    keys[i] = live ? LONGEST - __float_as_uint(params.half_norm[bh * params.C + 32 * i + lane]) : NO_KEY;
  }
  for (int position = 0; position < params.C; position++) {
    u32 least[N];
#pragma unroll
    for (int i = 0; i < N; i++) least[i] = keys[i];
    const u32 next = centroid_of(warp_minimum(least), keys, lane);
    if ((next & 31) == lane) {
      waiting &= ~(1u << (next >> 5));
      place_smem[next] = position;
    }
    const float* distances = params.distances + (bh * params.C + next) * params.C + lane;
#pragma unroll
    for (int i = 0; i < N; i++) keys[i] = (waiting >> i) & 1 ? __float_as_uint(distances[32 * i]) : NO_KEY;
  }
}

// The float centroid. Everyone reads a part before anyone writes it.
DEVICE void move_centroid(const Params& params, u64 bh, u32 cluster, int place, bool live) {
  constexpr int PART = 32;  // channels at a time
#pragma unroll 1
  for (int part = 0; part < HEAD_DIM; part += PART) {
    float4 channels[PART / 4];
#pragma unroll
    for (int i = 0; i < PART / 4; i++)
      if (live) channels[i] = load_as<float4>(params.centroids + (bh * params.C + cluster) * HEAD_DIM + part + 4 * i);
    __syncthreads();  // everyone holds this part of its centroid
#pragma unroll
    for (int i = 0; i < PART / 4; i++)
      if (live) store_as(params.centroids + (bh * params.C + place) * HEAD_DIM + part + 4 * i, channels[i]);
  }
}

// A thread has one centroid, which it moves to its place in the chain.
extern "C" __global__ void __launch_bounds__(MOST_CLUSTERS, 1) chain(const __grid_constant__ Params params) {
  wait_for_previous();
  __shared__ u16 places[MOST_CLUSTERS];
  const u32 cluster = threadIdx.x;
  const u64 bh = blockIdx.x;
  const bool live = cluster < static_cast<u32>(params.C);
  uint4 rounded[HEAD_DIM / 8];
  float half_norm = 0.f;
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 8; i++) {
    const uint4 pairs =
        live ? load_as<uint4>(params.rounded + (bh * params.C + cluster) * HEAD_DIM + 8 * i) : make_uint4(0, 0, 0, 0);
    rounded[i] = {pairs.x, pairs.y, pairs.z, pairs.w};  // copied whole, it compiles to code that was never measured
  }
  if (live) half_norm = params.half_norm[bh * params.C + cluster];
  if (cluster < 32) {
    if (params.C <= 256)
      walk<8>(params, bh, places);
    else
      walk<16>(params, bh, places);
  }
  __syncthreads();  // everyone holds its rounded centroid, the places are known

  const int place = live ? places[cluster] : 0;
  if (live) {
    params.half_norm[bh * params.C + place] = half_norm;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++) store_as(params.rounded + (bh * params.C + place) * HEAD_DIM + 8 * i, rounded[i]);
  }
  move_centroid(params, bh, cluster, place, live);
}
