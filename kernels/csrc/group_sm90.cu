// V-Smooth grouping on sm_90a: k-means over the value vectors of each (batch, head), then a stable counting sort. No host
// synchronisation, no float atomics: two runs give the same bits. Plain version: group/reference.py.
//
// Kernels (D = 128, C <= 512 clusters, one-dimensional grids). One round = assign, scan, scatter, segment_sum, update over every
// `step`-th token; the last pass = [distances, chain,] assign, scan, scatter over all tokens. Tokens are laid out by cluster number.
// Each but the first is brought in while the one before still runs (programmatic dependent launch) and begins by waiting for it.
//   init         warp = one centroid: previous one or the value of a token at equal spacing; rounded copy and half its squared length.
//   assign       CTA = one chunk of tokens of one head, warpgroup = 64 tokens: label = argmax (v.c - |c|^2 / 2) with c rounded to the
//                input type (wgmma, FP32 sums, the smaller label wins a tie); counts of the chunk per cluster.
//                (assign_wide: over 256 clusters.)
//   scan         CTA = one head: first position of every (cluster, chunk).
//   scatter      CTA = one chunk: stable positions inside the chunk -> permutation.
//   segment_sum  warp = 32 sorted positions: sums of the runs of equal labels. Run (segment s, cluster c) goes to slot s + c, which is
//                unique because both only grow along the sorted order.
//   update       CTA = one cluster: its slots in order -> new centroid. Empty (or not finite): the old one stays.
//   distances    warp = 16 x 64 pairs of centroids of one head (mma.sync).
//   chain        CTA = one head: renumbers the centroids along a greedy chain of nearest neighbours, beginning with the longest. One warp
//                walks, a step costs it one load from L2. Neighbours share a mixed block. A later warm start inherits the numbers and
//                needs no chain of its own.
//
// Requires: last dimension contiguous; INPUT_FP16 0 (bf16) or 1; VEC = alignment of every row start in bytes (16, 8, 4, 2).

typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64; typedef long long i64;
#ifndef INPUT_FP16
#define INPUT_FP16 0
#endif
#ifndef VEC
#define VEC 16
#endif
#define DEV __device__ __forceinline__

constexpr int D = 128;
constexpr int SEGMENT = 32;       // sorted positions per warp of segment_sum: a short sequence needs the warps
constexpr int MOST_CLUSTERS = 512;

struct Params {
  const u16* v; i64 v_b, v_h, v_s;  // strides in elements
  const float* previous;            // [BH, C, D] or null: cold start
  float* centroids;                 // [BH, C, D]
  u16* rounded;                     // [BH, C, D] input type
  float* half_norm;                 // [BH, C], of the rounded centroid
  u16* labels;                      // [BH, n]
  int* histogram;                   // [BH, chunks, C]: counts, after scan: exclusive over chunks
  int* start; int* count;           // [BH, C]: first sorted position, size
  int* permutation;                 // [BH, n] sorted position -> sample
  float* partial;                   // [BH, slots, D]
  float* distances;                 // [BH, C, C], half the squared distance of two rounded centroids; cold start only
  int B, H, S, C, n, step, chunk, chunks, segments, slots; // sample i is token i * step
  int heads_first;
};
static_assert(sizeof(Params) == 168, "group/cuda.py mirrors this structure");

DEV u32 lane_id(){ return threadIdx.x & 31; }
DEV void wait_for_previous(){ // lets the next kernel in; goes on when the one before has ended and its writes are visible
  asm volatile("griddepcontrol.launch_dependents;"); asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV bool finite(float x){ return fabsf(x) <= 3.402823466e38f; }
#if INPUT_FP16
DEV float to_f(u16 x){ float f; asm("cvt.f32.f16 %0,%1;" : "=f"(f) : "h"(x)); return f; }
DEV u16 from_f(float x){ u16 h; asm("cvt.rn.f16.f32 %0,%1;" : "=h"(h) : "f"(fminf(fmaxf(x, -65504.f), 65504.f))); return h; }
#define TYPE "f16"
#else
DEV float to_f(u16 x){ return __uint_as_float((u32)x << 16); }
DEV u16 from_f(float x){ u16 h; asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(h) : "f"(x)); return h; }
#define TYPE "bf16"
#endif
DEV float lo(u32 x){ return to_f((u16)(x & 0xffff)); }
DEV float hi(u32 x){ return to_f((u16)(x >> 16)); }
template<int BYTES> DEV void load(u32* r, const u16* p){ // BYTES at p, which is aligned to VEC
  constexpr int W = VEC < BYTES ? VEC : BYTES;
  if constexpr(W == 16) asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(p));
  else if constexpr(W == 8){
#pragma unroll
    for(int i = 0; i < BYTES/8; i++) asm volatile("ld.global.nc.v2.u32 {%0,%1},[%2];" : "=r"(r[2*i]), "=r"(r[2*i+1]) : "l"(p + 4*i));
  } else if constexpr(W == 4){
#pragma unroll
    for(int i = 0; i < BYTES/4; i++) asm volatile("ld.global.nc.u32 %0,[%1];" : "=r"(r[i]) : "l"(p + 2*i));
  } else {
#pragma unroll
    for(int i = 0; i < BYTES/4; i++){
      u16 a, b;
      asm volatile("ld.global.nc.u16 %0,[%1];" : "=h"(a) : "l"(p + 2*i));
      asm volatile("ld.global.nc.u16 %0,[%1];" : "=h"(b) : "l"(p + 2*i + 1));
      r[i] = a | ((u32)b << 16); }
  } }
DEV void split(u32 i, u32 n, const Params& p, u32& bh, u32& x){
  const u32 BH = p.B * p.H;
  if(p.heads_first){ x = i / BH; bh = i - x * BH; } else { bh = i / n; x = i - bh * n; } }
DEV const u16* head_start(const Params& p, u32 bh){ const u32 b = bh / p.H; return p.v + (i64)b * p.v_b + (i64)(bh - b * p.H) * p.v_h; }
// a warp holds one centroid, lane l channels 4 l .. 4 l + 3
DEV void store_centroid(const Params& p, u64 i /* bh C + c */, const float (&x)[4]){
  const u32 l = lane_id(); u16 h[4]; float s = 0.f;
#pragma unroll
  for(int e = 0; e < 4; e++){ h[e] = from_f(x[e]); const float y = to_f(h[e]); s = fmaf(y, y, s); }
#pragma unroll
  for(int m = 1; m < 32; m *= 2) s += __shfl_xor_sync(~0u, s, m);
  *(float4*)(p.centroids + i * D + 4*l) = make_float4(x[0], x[1], x[2], x[3]);
  *(uint2*)(p.rounded + i * D + 4*l) = make_uint2(h[0] | ((u32)h[1] << 16), h[2] | ((u32)h[3] << 16));
  if(l == 0) p.half_norm[i] = 0.5f * s; }

extern "C" __global__ void __launch_bounds__(128) init(const __grid_constant__ Params p){
  wait_for_previous();
  const u32 i = blockIdx.x * 4 + (threadIdx.x >> 5), l = lane_id();
  if(i >= (u32)p.B * p.H * p.C) return;
  const u32 bh = i / p.C, c = i - bh * p.C; float x[4];
  if(p.previous){ const float4 f = *(const float4*)(p.previous + (u64)i * D + 4*l); x[0] = f.x; x[1] = f.y; x[2] = f.z; x[3] = f.w; }
  else {
    const i64 t = p.C > 1 ? (i64)c * (p.S - 1) / (p.C - 1) : 0;
    u32 r[2]; load<8>(r, head_start(p, bh) + t * p.v_s + 4*l); x[0] = lo(r[0]); x[1] = hi(r[0]); x[2] = lo(r[1]); x[3] = hi(r[1]); }
#pragma unroll
  for(int e = 0; e < 4; e++) if(!finite(x[e])) x[e] = 0.f; // a NaN would stay for ever: its cluster never gets a token
  store_centroid(p, i, x);
}

DEV void wgmma64(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b){ // d (64 tokens x 64 clusters) += a (16 channels) b
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {"
      "%0,%1,%2,%3,%4,%5,%6,%7,"
      "%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31"
      "},{%32,%33,%34,%35},%36,1,1,1,0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)); }
DEV void keep(float (&d)[32]){
#pragma unroll
  for(int i = 0; i < 32; i++) asm volatile("" : "+f"(d[i]) :: "memory"); } // pins the accumulator between issue and wait
DEV u64 descriptor(u32 smem){ return (u64)((smem & 0x3ffff) >> 4) | (1ull << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62); } // K-major, 128-byte swizzle

// Shared memory: two panels of 64 channels, each [ROWS][128 bytes] with the 128-byte swizzle, channels in the order in which the
// A fragments hold them (a thread loads 16 bytes; its place in the quad is channel bits 4, 3). Then -|c|^2 / 2 and the counts.
template<int THREADS> DEV void assign_tokens(const Params& p){
  extern __shared__ u8 raw[];
  u8* smem = raw + (-(u32)__cvta_generic_to_shared(raw) & 1023);
  const int ROWS = (p.C + 63) & ~63;
  float* norm = (float*)(smem + ROWS * 256); int* hist = (int*)(norm + ROWS);
  u32 bh, x; split(blockIdx.x, p.chunks, p, bh, x);
  for(int i = threadIdx.x; i < ROWS * 16; i += THREADS){
    const int n = i >> 4, j = (i >> 2) & 3, c = i & 3;
    const uint4 f = n < p.C ? *(const uint4*)(p.rounded + ((u64)bh * p.C + n) * D + 32*j + 8*c) : make_uint4(0, 0, 0, 0);
    u8* row = smem + (j >> 1) * (ROWS * 128) + n * 128 + 4*c; const int piece = 4 * (j & 1);
    *(u32*)(row + 16 * ((piece + 0) ^ (n & 7))) = f.x; *(u32*)(row + 16 * ((piece + 1) ^ (n & 7))) = f.y;
    *(u32*)(row + 16 * ((piece + 2) ^ (n & 7))) = f.z; *(u32*)(row + 16 * ((piece + 3) ^ (n & 7))) = f.w; }
  for(int n = threadIdx.x; n < ROWS; n += THREADS){ norm[n] = n < p.C ? -p.half_norm[(u64)bh * p.C + n] : __int_as_float(0xff800000); hist[n] = 0; }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // the tensor cores read what ordinary stores wrote
  __syncthreads();
  const int g = lane_id() >> 2, c = lane_id() & 3;
  const u64 cent = descriptor(__cvta_generic_to_shared(smem));
  const u16* v = head_start(p, bh) + 8*c;
  const int end = min((int)(x + 1) * p.chunk, p.n), warp = threadIdx.x >> 5;
  for(int t = x * p.chunk + (warp >> 2) * 64; t < end; t += THREADS / 2){ // a warpgroup takes 64 tokens
    const int row = t + 16 * (warp & 3) + g;
    u32 a[2][4][4];
#pragma unroll
    for(int r = 0; r < 2; r++)
#pragma unroll
      for(int j = 0; j < 4; j++) load<16>(a[r][j], v + (i64)min(row + 8*r, p.n - 1) * p.step * p.v_s + 32*j);
    float best[2]; int label[2] = {0, 0}; best[0] = best[1] = __int_as_float(0xff800000);
    float s[32]; // one accumulator: the other warpgroups of the SM keep the tensor cores busy meanwhile (two do not fit in 128 registers)
    auto score = [&](int chunk){
#pragma unroll
      for(int i = 0; i < 8; i++){ const float2 h = *(const float2*)(norm + 64*chunk + 8*i + 2*c); s[4*i] = s[4*i+2] = h.x; s[4*i+1] = s[4*i+3] = h.y; }
      keep(s);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for(int j = 0; j < 4; j++)
#pragma unroll
        for(int ph = 0; ph < 2; ph++)
          wgmma64(s, a[0][j][2*ph], a[1][j][2*ph], a[0][j][2*ph+1], a[1][j][2*ph+1], cent + ((j >> 1) * (ROWS * 128) + chunk * 8192 + (2 * (j & 1) + ph) * 32) / 16);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      keep(s); };
    auto pick = [&](int chunk){
#pragma unroll
      for(int r = 0; r < 2; r++){
        float m = s[2*r]; int k = 0;
#pragma unroll
        for(int i = 0; i < 8; i++)
#pragma unroll
          for(int l = 0; l < 2; l++) if(i + l > 0){ const float y = s[4*i + 2*r + l]; k = y > m ? 8*i + l : k; m = fmaxf(y, m); }
        if(m > best[r]){ best[r] = m; label[r] = 64*chunk + k; } } };
#pragma unroll 1
    for(int chunk = 0; 64*chunk < ROWS; chunk++){ score(chunk); pick(chunk); }
#pragma unroll
    for(int r = 0; r < 2; r++){
      label[r] += 2*c;
#pragma unroll
      for(int m = 1; m < 4; m *= 2){
        const float y = __shfl_xor_sync(~0u, best[r], m); const int k = __shfl_xor_sync(~0u, label[r], m);
        if(y > best[r] || (y == best[r] && k < label[r])){ best[r] = y; label[r] = k; } }
      // NaN, or every score -inf: any cluster will do
      if(label[r] >= p.C) label[r] = 0;
      if(c == r && row + 8*r < end){ p.labels[(u64)bh * p.n + row + 8*r] = label[r]; atomicAdd(hist + label[r], 1); }
    }
  }
  __syncthreads();
  for(int i = threadIdx.x; i < p.C; i += THREADS) p.histogram[((u64)bh * p.chunks + x) * p.C + i] = hist[i];
}
extern "C" __global__ void __launch_bounds__(256, 2) assign(const __grid_constant__ Params p){ wait_for_previous(); assign_tokens<256>(p); }
extern "C" __global__ void __launch_bounds__(512, 1) assign_wide(const __grid_constant__ Params p){ wait_for_previous(); assign_tokens<512>(p); } // over 256 clusters: one CTA fills the SM
extern "C" __global__ void __launch_bounds__(512) scan(const __grid_constant__ Params p){
  wait_for_previous();
  __shared__ int warp_sum[16];
  const int c = threadIdx.x, lane = lane_id(); const u64 bh = blockIdx.x;
  int run = 0;
  if(c < p.C){
    int* h = p.histogram + bh * p.chunks * p.C + c;
    int i = 0;
    for(; i + 8 <= p.chunks; i += 8){
      int y[8];
#pragma unroll
      for(int e = 0; e < 8; e++) y[e] = h[(u64)(i + e) * p.C];
#pragma unroll
      for(int e = 0; e < 8; e++){ h[(u64)(i + e) * p.C] = run; run += y[e]; } }
    for(; i < p.chunks; i++){ const int y = h[(u64)i * p.C]; h[(u64)i * p.C] = run; run += y; }
    p.count[bh * p.C + c] = run;
  }
  int s = run;
#pragma unroll
  for(int m = 1; m < 32; m *= 2){ const int y = __shfl_up_sync(~0u, s, m); if(lane >= m) s += y; }
  if(lane == 31) warp_sum[c >> 5] = s;
  __syncthreads();
  for(int i = 0; i < (c >> 5); i++) s += warp_sum[i];
  if(c < p.C) p.start[bh * p.C + c] = s - run;
}

extern "C" __global__ void __launch_bounds__(256) scatter(const __grid_constant__ Params p){
  wait_for_previous();
  extern __shared__ int place[]; // [8 warps][C]
  const int w = threadIdx.x >> 5, lane = lane_id(); u32 bh, x; split(blockIdx.x, p.chunks, p, bh, x);
  for(int i = threadIdx.x; i < 8 * p.C; i += 256) place[i] = 0;
  __syncthreads();
  const u16* labels = p.labels + (u64)bh * p.n; int* mine = place + w * p.C;
  const int part = p.chunk / 8, begin = x * p.chunk + w * part, end = min(begin + part, p.n);
  // lanes with the same label; the lowest of them keeps the books of its warp. Lanes past the end take part under a label of their own.
  auto peers = [&](int t, int& label){ label = t + lane < end ? labels[t + lane] : 0xffff; return __match_any_sync(~0u, label); };
  for(int t = begin; t < end; t += 32){
    int label; const u32 same = peers(t, label);
    if(label != 0xffff && __ffs(same) - 1 == lane) mine[label] += __popc(same);
    __syncwarp(); }
  __syncthreads();
  for(int c = threadIdx.x; c < p.C; c += 256){
    int run = p.start[(u64)bh * p.C + c] + p.histogram[((u64)bh * p.chunks + x) * p.C + c];
#pragma unroll
    for(int i = 0; i < 8; i++){ const int y = place[i * p.C + c]; place[i * p.C + c] = run; run += y; } }
  __syncthreads();
  for(int t = begin; t < end; t += 32){
    int label; const u32 same = peers(t, label);
    if(label != 0xffff) p.permutation[(u64)bh * p.n + mine[label] + __popc(same & ((1u << lane) - 1))] = t + lane;
    __syncwarp();
    if(label != 0xffff && __ffs(same) - 1 == lane) mine[label] += __popc(same);
    __syncwarp(); }
}

extern "C" __global__ void __launch_bounds__(128) segment_sum(const __grid_constant__ Params p){
  wait_for_previous();
  const u32 i = blockIdx.x * 4 + (threadIdx.x >> 5), lane = lane_id();
  if(i >= (u32)p.B * p.H * p.segments) return;
  const u32 bh = i / p.segments, seg = i - bh * p.segments;
  const u16* v = head_start(p, bh) + 4*lane;
  const int begin = seg * SEGMENT, end = min(begin + SEGMENT, p.n);
  const int* pi = p.permutation + (u64)bh * p.n; const u16* labels = p.labels + (u64)bh * p.n;
  float s[4] = {0.f, 0.f, 0.f, 0.f}; int current = -1;
  auto flush = [&](){ if(current >= 0) *(float4*)(p.partial + ((u64)bh * p.slots + seg + current) * D + 4*lane) = make_float4(s[0], s[1], s[2], s[3]); };
  for(int t = begin; t < end; t += 32){
    const int sample = pi[min(t + (int)lane, p.n - 1)], label = labels[sample];
#pragma unroll
    for(int half = 0; half < 32; half += 16){
      u32 r[16][2];
#pragma unroll
      for(int e = 0; e < 16; e++) load<8>(r[e], v + (i64)__shfl_sync(~0u, sample, half + e) * p.step * p.v_s);
#pragma unroll
      for(int e = 0; e < 16; e++){
        const int l = __shfl_sync(~0u, label, half + e);
        if(t + half + e < end){
          if(l != current){ flush(); current = l; s[0] = s[1] = s[2] = s[3] = 0.f; }
          s[0] += lo(r[e][0]); s[1] += hi(r[e][0]); s[2] += lo(r[e][1]); s[3] += hi(r[e][1]); } }
    }
  }
  flush();
}

extern "C" __global__ void __launch_bounds__(128) update(const __grid_constant__ Params p){
  wait_for_previous();
  __shared__ float4 part[4][32];
  const u32 w = threadIdx.x >> 5, lane = lane_id(), bh = blockIdx.x / p.C, c = blockIdx.x - bh * p.C;
  const int n = p.count[blockIdx.x], first = p.start[blockIdx.x];
  if(n == 0) return;
  const int s0 = first / SEGMENT, s1 = (first + n - 1) / SEGMENT;
  const float* o = p.partial + ((u64)bh * p.slots + c) * D + 4*lane;
  float4 s = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
  for(int i = s0 + w; i <= s1; i += 4){ const float4 y = *(const float4*)(o + (u64)i * D); s.x += y.x; s.y += y.y; s.z += y.z; s.w += y.w; }
  part[w][lane] = s; __syncthreads();
  if(w) return;
  float x[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
  for(int i = 1; i < 4; i++){ const float4 y = part[i][lane]; x[0] += y.x; x[1] += y.y; x[2] += y.z; x[3] += y.w; }
  const float inv = 1.f / (float)n; bool ok = true;
#pragma unroll
  for(int e = 0; e < 4; e++){ x[e] *= inv; ok &= finite(x[e]); }
  if(__all_sync(~0u, ok)) store_centroid(p, blockIdx.x, x);
}

extern "C" __global__ void __launch_bounds__(128) distances(const __grid_constant__ Params p){
  wait_for_previous();
  const u32 rows = (p.C + 15) / 16, columns = (p.C + 63) / 64, i = blockIdx.x * 4 + (threadIdx.x >> 5);
  if(i >= (u32)p.B * p.H * rows * columns) return;
  const u32 bh = i / (rows * columns), tile = i - bh * (rows * columns), g = lane_id() >> 2, c = lane_id() & 3;
  const int y0 = 16 * (tile / columns), x0 = 64 * (tile % columns);
  const float* norm = p.half_norm + (u64)bh * p.C;
  auto pair = [&](int n, int channel){ return *(const u32*)(p.rounded + ((u64)bh * p.C + min(n, p.C - 1)) * D + channel + 2*c); };
  u32 a[8][4];
#pragma unroll
  for(int k = 0; k < 8; k++)
#pragma unroll
    for(int e = 0; e < 4; e++) a[k][e] = pair(y0 + g + 8 * (e & 1), 16*k + 8 * (e >> 1));
  for(int x = x0; x < min(x0 + 64, p.C); x += 8){
    float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for(int k = 0; k < 8; k++)
      asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[k][0]), "r"(a[k][1]), "r"(a[k][2]), "r"(a[k][3]), "r"(pair(x + g, 16*k)), "r"(pair(x + g, 16*k + 8)));
#pragma unroll
    for(int e = 0; e < 4; e++){
      const int row = y0 + g + 8 * (e >> 1), column = x + 2*c + (e & 1);
      if(row < p.C && column < p.C) p.distances[((u64)bh * p.C + row) * p.C + column] = fmaxf((norm[row] + norm[column]) - d[e], 0.f); }
  }
}

// place[centroid] = its position in the chain. Lane l of one warp has centroids l, l + 32, .., N of them. Non-negative floats sort as
// integers; NONE marks those that already have a place.
template<int N> DEV void walk(const Params& p, u64 bh, u16* place){
  constexpr u32 NONE = ~0u;
  const u32 lane = lane_id(); u32 key[N], waiting = 0;
#pragma unroll
  for(int e = 0; e < N; e++){
    const bool live = 32*e + (int)lane < p.C;
    if(live) waiting |= 1u << e;
    key[e] = live ? 0x7f800000u - __float_as_uint(p.half_norm[bh * p.C + 32*e + lane]) : NONE; } // first: the longest
  for(int k = 0; k < p.C; k++){
    u32 least[N];
#pragma unroll
    for(int e = 0; e < N; e++) least[e] = key[e];
#pragma unroll
    for(int s = N / 2; s; s /= 2)
#pragma unroll
      for(int e = 0; e < s; e++) least[e] = min(least[e], least[e + s]);
    const u32 low = __reduce_min_sync(~0u, least[0]);
    u32 hits = 0;
#pragma unroll
    for(int e = 0; e < N; e++) hits |= key[e] == low ? 1u << e : 0u;
    const u32 next = __reduce_min_sync(~0u, hits ? 32 * (__ffs(hits) - 1) + lane : NONE); // the smaller number wins a tie
    if((next & 31) == lane){ waiting &= ~(1u << (next >> 5)); place[next] = k; }
    const float* d = p.distances + (bh * p.C + next) * p.C + lane;
#pragma unroll
    for(int e = 0; e < N; e++) key[e] = (waiting >> e) & 1 ? __float_as_uint(d[32*e]) : NONE;
  }
}
extern "C" __global__ void __launch_bounds__(512, 1) chain(const __grid_constant__ Params p){
  wait_for_previous();
  __shared__ u16 places[MOST_CLUSTERS];
  const u32 c = threadIdx.x; const u64 bh = blockIdx.x;
  const bool live = c < (u32)p.C;
  u32 row[64]; float norm = 0.f;
#pragma unroll
  for(int i = 0; i < 16; i++){
    const uint4 f = live ? *(const uint4*)(p.rounded + (bh * p.C + c) * D + 8*i) : make_uint4(0, 0, 0, 0);
    row[4*i] = f.x; row[4*i+1] = f.y; row[4*i+2] = f.z; row[4*i+3] = f.w; }
  if(live) norm = p.half_norm[bh * p.C + c];
  if(c < 32){ if(p.C <= 256) walk<8>(p, bh, places); else walk<16>(p, bh, places); }
  __syncthreads(); // everyone holds its row, the places are known
  const int place = live ? places[c] : 0;
  if(live){
    p.half_norm[bh * p.C + place] = norm;
    u16* r = p.rounded + (bh * p.C + place) * D;
#pragma unroll
    for(int i = 0; i < 16; i++) *(uint4*)(r + 8*i) = make_uint4(row[4*i], row[4*i+1], row[4*i+2], row[4*i+3]); }
#pragma unroll 1
  for(int part = 0; part < D; part += 32){
    float4 f[8];
#pragma unroll
    for(int i = 0; i < 8; i++) if(live) f[i] = *(const float4*)(p.centroids + (bh * p.C + c) * D + part + 4*i);
    __syncthreads(); // everyone holds this part of its row
#pragma unroll
    for(int i = 0; i < 8; i++) if(live) *(float4*)(p.centroids + (bh * p.C + place) * D + part + 4*i) = f[i];
  }
}
