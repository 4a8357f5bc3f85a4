// Preparation of the 8-bit attention operands on sm_90a: q, k, v (strided, 16 bit) -> q8, k8, v8, scales, block means.
// Layout, roundings and a plain version of every step: quantize/hopper.py; with -DPRECISE=1: quantize/precise.py.
//
// Three launches (D = 128, BLOCK = 128 tokens, one-dimensional grids, the kind of work chosen by the CTA's number):
//   stats   key_stats    CTA = 512 key tokens of one head: sum, min, max per ROTATED channel. The largest |rotated (k - mean)| follows
//                        from them (rounding is monotonic, so max(x) - m is the max of x - m), hence one pass instead of two.
//           value_stats  CTA = 8 blocks of 128 value rows (gathered): block means, largest |v - mean| and |mean| per channel.
//   finish  CTA = K or V of one head: folds the partials in a fixed order; mean, k_scale, v_scale.
//   write   write_key    warp = 16 rows (gathered) at a time, CTA = 256: rotate, subtract the mean, INT8 with the head's scale.
//           write_value  CTA = 4 blocks: residual against the stored mean, E4M3, transposed, keys permuted.
//           write_query  as write_key: rotate, INT8 with one scale per row.
//           write_means  CTA = 16 blocks.
// PRECISE: the attention kernel reads v itself. So value_check, which only looks for NaN and infinity, stands in for value_stats, and
//          write_value and write_means are left out; write_key gives every 128 rows a scale of their own.
//
// Rotation. Sylvester-Hadamard of 128 = 2^7: a thread loads 16 bytes (channel bits 2..0; its place in the quad is bits 4, 3; the load
// number is bits 6, 5). One m16n8k16 product with a 16 x 16 sign matrix mixes bits 4, 3, 1, 0 (16-bit inputs times +-1 are exact, FP32
// sums), three butterflies between registers mix bits 6, 5, 2. The factor 1/sqrt(128) is folded into the scales.
//
// Requires: last dimension contiguous; INPUT_FP16 0 (bf16) or 1; VEC = bytes to which every row start is aligned (16, 8, 4 or 2).
// Deterministic: no float atomics, every sum in a fixed order. Sequence lengths, strides and head counts are run-time values.

typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64; typedef long long i64;
#ifndef INPUT_FP16
#define INPUT_FP16 0
#endif
#ifndef VEC
#define VEC 16
#endif
#ifndef PRECISE
#define PRECISE 0
#endif
#define DEV __device__ __forceinline__

constexpr int D = 128, BLOCK = 128;
constexpr int KEY_CHUNK = 512;        // key tokens per CTA of key_stats
constexpr int VALUE_CHUNK = 8;        // blocks per CTA of value_stats
constexpr int WRITE_ROWS = 256;       // rows per CTA of write_query and write_key
constexpr int CTAS = VEC == 16 ? 4 : VEC == 8 ? 3 : 2; // per SM; narrow loads need more registers
constexpr int WRITE_CTAS = VEC == 16 ? 3 : 2; // 4 would spill a few bytes and gains 0.4 %
constexpr float INV_SQRT_D = 0.08838834764831845f;
// Codes per 256 units: below 0.16 a score needs more bits than the fast kernel has; the precise one takes any.
constexpr float Q_SCALE_MIN = PRECISE ? 0x1p-10f : 0.16f;
constexpr int FLAG_NOT_FINITE = 1;

struct Params {
  const u16 *q, *k, *v;                           // 16-bit elements
  i64 q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s; // strides in elements
  const int *permutation;                         // [B*H, S_kv] or null: key order
  u32 *q8; float *q_scale;                        // [BH, S_q_pad, D], [BH, S_q_pad]
  u32 *k8; float *k_scale;                        // [BH, S_kv_pad, D], [BH]
  u32 *v8; float *v_scale; u32 *means;            // [BH, D, S_kv_pad], [BH, D], half [BH, D, NB16]
  int *flag;                                      // [1], FLAG_NOT_FINITE
  float *key_partial;                             // [BH, key_chunks, 3, D]
  float *value_partial;                           // [BH, value_chunks, 2, D]; if PRECISE [BH, value_chunks], 0 or infinity
  float *key_mean;                                // [BH, D], rotated, not normalized
  float *block_mean;                              // [BH, NB, D]
  float *k_block_scale;                           // [BH, NB], relative to k_scale; only if PRECISE
  int B, H, S_q, S_kv, S_q_pad, S_kv_pad, NB, NB16, key_chunks, value_chunks;
  int q_heads_first, k_heads_first, gather_heads_first; // 1: neighbouring CTAs take neighbouring heads (tokens far apart in memory, read in order)
  int demean;                                     // 0: block means are taken as zero
  float score_scale;                              // 8 * log2(e) * softmax scale
};
static_assert(sizeof(Params) == 272, "quantize/cuda.py mirrors this structure");

// --- small pieces -----------------------------------------------------------------------------------------------------------------
DEV u32 lane_id(){ return threadIdx.x & 31; }
DEV void join_the_chain(){ // the next kernel may be brought in; this one goes on when the one before has ended and its writes are visible
  asm volatile("griddepcontrol.launch_dependents;"); asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV float h2f(u16 x){ float f; asm("cvt.f32.f16 %0,%1;" : "=f"(f) : "h"(x)); return f; }
DEV u16 f2h(float x){ u16 h; asm("cvt.rn.f16.f32 %0,%1;" : "=h"(h) : "f"(x)); return h; }
DEV u16 f2h_up(float x){ u16 h; asm("cvt.rp.f16.f32 %0,%1;" : "=h"(h) : "f"(x)); return h; }
DEV bool finite(float x){ return fabsf(x) <= 3.402823466e38f; }
#if INPUT_FP16
DEV float lo(u32 x){ return h2f((u16)(x & 0xffff)); }
DEV float hi(u32 x){ return h2f((u16)(x >> 16)); }
DEV u32 min2(u32 a, u32 b){ u32 d; asm("min.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
DEV u32 max2(u32 a, u32 b){ u32 d; asm("max.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
constexpr u32 ONE = 0x3c00, POS_INF2 = 0x7c007c00;
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#else
DEV float lo(u32 x){ return __uint_as_float(x << 16); }
DEV float hi(u32 x){ return __uint_as_float(x & 0xffff0000u); }
DEV u32 min2(u32 a, u32 b){ u32 d; asm("min.bf16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
DEV u32 max2(u32 a, u32 b){ u32 d; asm("max.bf16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b)); return d; }
constexpr u32 ONE = 0x3f80, POS_INF2 = 0x7f807f80;
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#endif
DEV void mma0(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1){ // d = a b
  asm(MMA "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f)); }
DEV u32 signs(u32 o, u32 i){ // entries (o, i) and (o, i+1) of the 16 x 16 sign matrix
  return (ONE | ((__popc(o & i) & 1) << 15)) | ((ONE | ((__popc(o & (i + 1)) & 1) << 15)) << 16); }

// 16 bytes at p, which is aligned to VEC
DEV void load16(u32 (&r)[4], const u16* p){
#if VEC == 16
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(p));
#elif VEC == 8
#pragma unroll
  for(int i = 0; i < 2; i++) asm volatile("ld.global.nc.v2.u32 {%0,%1},[%2];" : "=r"(r[2*i]), "=r"(r[2*i+1]) : "l"(p + 4*i));
#elif VEC == 4
#pragma unroll
  for(int i = 0; i < 4; i++) asm volatile("ld.global.nc.u32 %0,[%1];" : "=r"(r[i]) : "l"(p + 2*i));
#else
#pragma unroll
  for(int i = 0; i < 4; i++){
    u16 a, b;
    asm volatile("ld.global.nc.u16 %0,[%1];" : "=h"(a) : "l"(p + 2*i));
    asm volatile("ld.global.nc.u16 %0,[%1];" : "=h"(b) : "l"(p + 2*i + 1));
    r[i] = a | ((u32)b << 16);
  }
#endif
}
DEV float4 load_f4(const float* p){ return *(const float4*)p; }
DEV void split(u32 i, u32 n, const Params& p, int heads_first, u32& bh, u32& x){ // CTA number -> head, place in the sequence (n places)
  const u32 BH = p.B * p.H;
  if(heads_first){ x = i / BH; bh = i - x * BH; } else { bh = i / n; x = i - bh * n; } }
DEV const u16* head_start(const u16* t, i64 sb, i64 sh, u32 bh, int H){ const u32 b = bh / H; return t + (i64)b * sb + (i64)(bh - b * H) * sh; }

// --- rotation, one row per accumulator row -----------------------------------------------------------------------------------------
// Signs as the B operand. Column n = lane / 4 is output (n>>1 -> bits 4, 3; t -> bit 1; n&1 -> bit 0), so that the accumulator of a
// thread holds, for load j, the eight neighbouring channels 32 j + 8 c + 4 ph + 2 t + l.
DEV u32 signs_b(){ // of t = 0, where inputs with and without bit 1 have the same sign; t = 1 negates those with it
  const u32 g = lane_id() >> 2, c = lane_id() & 3; return signs(((g >> 1) << 2) | (g & 1), 4*c); }
template<int N> DEV void butterflies(float (&x)[8][N]){ // over the first index
#pragma unroll
  for(int s = 1; s < 8; s *= 2)
#pragma unroll
    for(int u = 0; u < 8; u++) if(!(u & s))
#pragma unroll
      for(int n = 0; n < N; n++){ const float a = x[u][n], b = x[u + s][n]; x[u][n] = a + b; x[u + s][n] = a - b; } }
typedef u32 Tile[2][4][4]; // rows lane/4 and lane/4 + 8 of 16, four loads of 16 bytes each
DEV void load_tile(Tile& a, const u16* row0, const u16* row1){ // row starts, already moved by 8 c channels
#pragma unroll
  for(int j = 0; j < 4; j++){ load16(a[0][j], row0 + 32*j); load16(a[1][j], row1 + 32*j); } }
// x[2 j + ph][4 t + 2 r + l]: channel as above, row r. The products consume the tile, so the next one can be loaded before the butterflies.
DEV void products(float (&x)[8][8], const Tile& a, u32 h){
#pragma unroll
  for(int j = 0; j < 4; j++)
#pragma unroll
    for(int ph = 0; ph < 2; ph++)
#pragma unroll
      for(int t = 0; t < 2; t++){
        float d[4]; mma0(d, a[0][j][2*ph], a[1][j][2*ph], a[0][j][2*ph+1], a[1][j][2*ph+1], h, t ? h ^ 0x80008000u : h);
#pragma unroll
        for(int i = 0; i < 4; i++) x[2*j+ph][4*t+i] = d[i];
      }
}
constexpr float MAGIC = 12582912.f; // 1.5 * 2^23: adding it rounds to the nearest even integer, whose low byte is the INT8 code
DEV u32 pack4(float a, float b, float c, float d){
  return __byte_perm(__byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040), __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040), 0x5410); }
// 32 codes of row r (0 or 1) of the thread, in four pieces of 8 bytes; y = x in code units
template<class F> DEV void store_codes(u32* row /* + 8 c bytes */, bool real, int r, F y){
  uint2 piece[4];
#pragma unroll
  for(int j = 0; j < 4; j++){
    piece[j].x = pack4(y(2*j, 2*r), y(2*j, 2*r+1), y(2*j, 4+2*r), y(2*j, 5+2*r));
    piece[j].y = pack4(y(2*j+1, 2*r), y(2*j+1, 2*r+1), y(2*j+1, 4+2*r), y(2*j+1, 5+2*r));
    if(!real) piece[j] = make_uint2(0u, 0u);
  }
#pragma unroll
  for(int j = 0; j < 4; j++) *(uint2*)(row + 8*j) = piece[j];
}

DEV void write_query(const Params& p, u32 cta){
  const u32 g = lane_id() >> 2, c = lane_id() & 3;
  u32 bh, place; split(cta, (p.S_q_pad + WRITE_ROWS - 1) / WRITE_ROWS, p, p.q_heads_first, bh, place);
  const int last = p.S_q - 1, end = min((int)(place + 1) * WRITE_ROWS, p.S_q_pad);
  const u16* q = head_start(p.q, p.q_b, p.q_h, bh, p.H) + 8*c;
  const float sk256 = 256.f * p.k_scale[bh], cn = p.score_scale * INV_SQRT_D;
  const u32 h = signs_b();
  Tile a;
  auto fetch = [&](int t){ load_tile(a, q + (i64)min(t, last) * p.q_s, q + (i64)min(t + 8, last) * p.q_s); };
  int t0 = place * WRITE_ROWS + (threadIdx.x >> 5) * 16 + g;
  if(t0 - (int)g < end) fetch(t0);
#pragma unroll 1
  for(; t0 - (int)g < end; t0 += 64){
    float x[8][8]; products(x, a, h);
    if(t0 - (int)g + 64 < end) fetch(t0 + 64);
    butterflies(x);
    if(!finite(x[0][0]) || !finite(x[0][2])) atomicOr(p.flag, FLAG_NOT_FINITE); // every input is in every sum
    float m[2];
#pragma unroll
    for(int r = 0; r < 2; r++){
      m[r] = 0.f;
#pragma unroll
      for(int u = 0; u < 8; u++) m[r] = fmaxf(fmaxf(fmaxf(m[r], fabsf(x[u][2*r])), fmaxf(fabsf(x[u][2*r+1]), fabsf(x[u][4+2*r]))), fabsf(x[u][5+2*r]));
      m[r] = fmaxf(m[r], __shfl_xor_sync(~0u, m[r], 1)); m[r] = fmaxf(m[r], __shfl_xor_sync(~0u, m[r], 2));
    }
#pragma unroll
    for(int r = 0; r < 2; r++){
      const int t = t0 + 8*r; const bool real = t <= last;
      const float want = real ? m[r] * cn / 127.f * sk256 : 0.f;      // codes (1/8 octave) per 256 units of q8.k8
      const float scale = h2f(f2h_up(fminf(fmaxf(want, Q_SCALE_MIN), 128.f)));
      // beyond the cap the row keeps its direction at a smaller length; its scores are 4096 octaves apart all the same
      const float mult = want > 128.f ? 127.f / m[r] : cn * sk256 / scale;
      const u32 row = bh * p.S_q_pad + t; // below 2^31, the host checks
      store_codes(p.q8 + (u64)row * 32 + 2*c, real, r, [&](int u, int i){ return fmaf(x[u][i], mult, MAGIC); });
      if(c == 0) p.q_scale[row] = scale;
    }
  }
}

DEV void subtract_mean(float (&x)[8][8], const float* mean /* + 8 c */){
#pragma unroll
  for(int j = 0; j < 4; j++)
#pragma unroll
    for(int ph = 0; ph < 2; ph++){
      const float4 m = load_f4(mean + 32*j + 4*ph); float (&y)[8] = x[2*j+ph];
      y[0] -= m.x; y[1] -= m.y; y[2] -= m.x; y[3] -= m.y; y[4] -= m.z; y[5] -= m.w; y[6] -= m.z; y[7] -= m.w;
    }
}
#if PRECISE
constexpr float K_SCALE_MIN = 0x1p-10f; // of the head's scale; a block of zeros needs one, too
DEV float largest_of_cta(float m){ // 128 threads
  __shared__ float part[4];
#pragma unroll
  for(int s = 1; s < 32; s *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, s));
  __syncthreads(); // everybody has read what the call before left
  if(lane_id() == 0) part[threadIdx.x >> 5] = m;
  __syncthreads();
  return fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
}
// Two passes over a block of 128 rows, the second from L2: its scale is known only after the first.
DEV void write_key(const Params& p, u32 cta){
  const u32 g = lane_id() >> 2, c = lane_id() & 3;
  u32 bh, place; split(cta, (p.S_kv_pad + WRITE_ROWS - 1) / WRITE_ROWS, p, p.gather_heads_first, bh, place);
  const int last = p.S_kv - 1, end = min((int)(place + 1) * WRITE_ROWS, p.S_kv_pad);
  const u16* k = head_start(p.k, p.k_b, p.k_h, bh, p.H) + 8*c;
  const int* pi = p.permutation ? p.permutation + (i64)bh * p.S_kv : nullptr;
  const float* mean = p.key_mean + bh * D + 8*c;
  const float head_scale = p.k_scale[bh];
  const u32 h = signs_b();
  auto rotated = [&](float (&x)[8][8], int t){ // rows t and t + 8; past the end the last one
    int s0 = min(t, last), s1 = min(t + 8, last); if(pi){ s0 = pi[s0]; s1 = pi[s1]; }
    Tile a; load_tile(a, k + (i64)s0 * p.k_s, k + (i64)s1 * p.k_s);
    products(x, a, h); butterflies(x); subtract_mean(x, mean); };
#pragma unroll 1
  for(int block = place * (WRITE_ROWS / BLOCK); block * BLOCK < end; block++){
    const int first = block * BLOCK + (threadIdx.x >> 5) * 16 + g;
    float m = 0.f;
#pragma unroll 1
    for(int t = first; t < (block + 1) * BLOCK; t += 64){
      float x[8][8]; rotated(x, t);
#pragma unroll
      for(int u = 0; u < 8; u++)
#pragma unroll
        for(int i = 0; i < 8; i++) m = fmaxf(m, fabsf(x[u][i]));
    }
    const float scale = fmaxf(largest_of_cta(m) * INV_SQRT_D / 127.f, K_SCALE_MIN * head_scale), mult = INV_SQRT_D / scale;
    if(threadIdx.x == 0) p.k_block_scale[bh * p.NB + block] = scale / head_scale;
#pragma unroll 1
    for(int t = first; t < (block + 1) * BLOCK; t += 64){
      float x[8][8]; rotated(x, t);
#pragma unroll
      for(int r = 0; r < 2; r++)
        store_codes(p.k8 + (u64)(u32)(bh * p.S_kv_pad + t + 8*r) * 32 + 2*c, t + 8*r <= last, r, [&](int u, int i){ return fmaf(x[u][i], mult, MAGIC); });
    }
  }
}
#else
DEV void write_key(const Params& p, u32 cta){
  const u32 g = lane_id() >> 2, c = lane_id() & 3;
  u32 bh, place; split(cta, (p.S_kv_pad + WRITE_ROWS - 1) / WRITE_ROWS, p, p.gather_heads_first, bh, place);
  const int last = p.S_kv - 1, end = min((int)(place + 1) * WRITE_ROWS, p.S_kv_pad);
  const u16* k = head_start(p.k, p.k_b, p.k_h, bh, p.H) + 8*c;
  const int* pi = p.permutation ? p.permutation + (i64)bh * p.S_kv : nullptr;
  const float* mean = p.key_mean + bh * D + 8*c;
  const float mult = INV_SQRT_D / p.k_scale[bh];
  const u32 h = signs_b();
  int s0, s1; // source rows of the tile after the one in flight
  auto source = [&](int t){ s0 = min(t, last); s1 = min(t + 8, last); if(pi){ s0 = pi[s0]; s1 = pi[s1]; } };
  Tile a;
  int t0 = place * WRITE_ROWS + (threadIdx.x >> 5) * 16 + g;
  source(t0);
  if(t0 - (int)g < end) load_tile(a, k + (i64)s0 * p.k_s, k + (i64)s1 * p.k_s);
  source(t0 + 64);
#pragma unroll 1
  for(; t0 - (int)g < end; t0 += 64){
    float x[8][8]; products(x, a, h);
    if(t0 - (int)g + 64 < end) load_tile(a, k + (i64)s0 * p.k_s, k + (i64)s1 * p.k_s);
    source(t0 + 128);
    butterflies(x);
    subtract_mean(x, mean);
#pragma unroll
    for(int r = 0; r < 2; r++){
      const int t = t0 + 8*r;
      store_codes(p.k8 + (u64)(u32)(bh * p.S_kv_pad + t) * 32 + 2*c, t <= last, r, [&](int u, int i){ return fmaf(x[u][i], mult, MAGIC); });
    }
  }
}
#endif

// --- K: sum, min, max per rotated channel ------------------------------------------------------------------------------------------
// Here the signs are the A operand and the tokens the columns, so that a thread holds 16 channels (48 running values instead of 96).
// d[u][2 r + n]: channel ch(g + 8 r, u), token 2 c + n of 8.
DEV int channel_a(u32 o, int u){ return ((u >> 1) << 5) | ((o >> 2) << 3) | ((u & 1) << 2) | (o & 3); }
DEV void key_stats(const Params& p, u32 cta){
  __shared__ float part[4][3][D];
  const u32 w = threadIdx.x >> 5, g = lane_id() >> 2, c = lane_id() & 3;
  u32 bh, x; split(cta, p.key_chunks, p, p.k_heads_first, bh, x);
  const u32 h0 = signs(g, 4*c), h1 = signs(g + 8, 4*c), h2 = signs(g, 4*c + 2), h3 = signs(g + 8, 4*c + 2);
  const int begin = x * KEY_CHUNK, end = min(begin + KEY_CHUNK, p.S_kv), last = p.S_kv - 1;
  const u16* k = head_start(p.k, p.k_b, p.k_h, bh, p.H) + 8*c;
  float sum[8][2], mn[8][2], mx[8][2];
#pragma unroll
  for(int u = 0; u < 8; u++)
#pragma unroll
    for(int r = 0; r < 2; r++){ sum[u][r] = 0.f; mn[u][r] = __int_as_float(0x7f800000); mx[u][r] = __int_as_float(0xff800000); }
  u32 a[2][4][4]; // two tiles of 8 tokens; the products consume one, then its successor is loaded into its place
  auto fetch = [&](u32 (&b)[4][4], int t){
#pragma unroll
    for(int j = 0; j < 4; j++) load16(b[j], k + (i64)min(t + (int)g, last) * p.k_s + 32*j); };
  int t = begin + 16 * w;
  if(t < end){ fetch(a[0], t); fetch(a[1], t + 8); }
  for(; t < end; t += 64){
#pragma unroll
    for(int i = 0; i < 2; i++){
      float d[8][4];
#pragma unroll
      for(int j = 0; j < 4; j++){ mma0(d[2*j], h0, h1, h2, h3, a[i][j][0], a[i][j][1]); mma0(d[2*j+1], h0, h1, h2, h3, a[i][j][2], a[i][j][3]); }
      if(t + 64 < end) fetch(a[i], t + 64 + 8*i);
      butterflies(d);
      const int tok = t + 8*i + 2*c;
      if(t + 16 <= end){
#pragma unroll
        for(int u = 0; u < 8; u++)
#pragma unroll
          for(int r = 0; r < 2; r++){
            sum[u][r] += d[u][2*r] + d[u][2*r+1];
            mn[u][r] = fminf(mn[u][r], fminf(d[u][2*r], d[u][2*r+1])); mx[u][r] = fmaxf(mx[u][r], fmaxf(d[u][2*r], d[u][2*r+1])); }
      } else {
#pragma unroll
        for(int n = 0; n < 2; n++) if(tok + n < end)
#pragma unroll
          for(int u = 0; u < 8; u++)
#pragma unroll
            for(int r = 0; r < 2; r++){ const float y = d[u][2*r+n]; sum[u][r] += y; mn[u][r] = fminf(mn[u][r], y); mx[u][r] = fmaxf(mx[u][r], y); }
      }
    }
  }
#pragma unroll
  for(int u = 0; u < 8; u++)
#pragma unroll
    for(int r = 0; r < 2; r++){
#pragma unroll
      for(int s = 1; s < 4; s *= 2){
        sum[u][r] += __shfl_xor_sync(~0u, sum[u][r], s);
        mn[u][r] = fminf(mn[u][r], __shfl_xor_sync(~0u, mn[u][r], s)); mx[u][r] = fmaxf(mx[u][r], __shfl_xor_sync(~0u, mx[u][r], s)); }
      if(c == 0){ const int ch = channel_a(g + 8*r, u); part[w][0][ch] = sum[u][r]; part[w][1][ch] = mn[u][r]; part[w][2][ch] = mx[u][r]; }
    }
  __syncthreads();
  const int d = threadIdx.x;
  const float s = (part[0][0][d] + part[1][0][d]) + (part[2][0][d] + part[3][0][d]);
  float* o = p.key_partial + ((u64)bh * p.key_chunks + x) * (3 * D) + d;
  o[0] = s;
  o[D] = fminf(fminf(part[0][1][d], part[1][1][d]), fminf(part[2][1][d], part[3][1][d]));
  o[2*D] = fmaxf(fmaxf(part[0][2][d], part[1][2][d]), fmaxf(part[2][2][d], part[3][2][d]));
}

// --- V -----------------------------------------------------------------------------------------------------------------------------
// A half-warp reads one row (16 lanes x 16 bytes); warp w has rows 32 w.. of the block, its halves 16 rows each.
DEV void load_rows(u32 (&r)[16][4], const Params& p, u32 bh, const u16* v /* head */, int block){
  const int w = threadIdx.x >> 5, lane = lane_id(), half = lane >> 4, chunk = lane & 15;
  int s = min(block * BLOCK + 32*w + lane, p.S_kv - 1);
  if(p.permutation) s = p.permutation[(i64)bh * p.S_kv + s];
#pragma unroll
  for(int i = 0; i < 16; i++) load16(r[i], v + (i64)__shfl_sync(~0u, s, half * 16 + i) * p.v_s + 8 * chunk);
}
#if PRECISE
// CTA = 8 blocks of one head. An exponent of ones carries into the sign when its lowest bit is added.
DEV void value_check(const Params& p, u32 cta){
  u32 bh, x; split(cta, p.value_chunks, p, p.gather_heads_first, bh, x);
  const u16* v = head_start(p.v, p.v_b, p.v_h, bh, p.H);
  const int first = x * VALUE_CHUNK, n = min(VALUE_CHUNK, p.NB - first);
  constexpr u32 lowest = INPUT_FP16 ? 0x04000400 : 0x00800080;
  u32 carry = 0;
  for(int i = 0; i < n; i++){
    u32 r[16][4]; load_rows(r, p, bh, v, first + i);
#pragma unroll
    for(int t = 0; t < 16; t++)
#pragma unroll
      for(int e = 0; e < 4; e++) carry |= (r[t][e] & POS_INF2) + lowest;
  }
  const bool bad = __syncthreads_or(carry & 0x80008000u);
  if(threadIdx.x == 0) p.value_partial[(u64)bh * p.value_chunks + x] = bad ? __int_as_float(0x7f800000) : 0.f;
}
#else
DEV void value_stats(const Params& p, u32 cta){
  __shared__ float sums[2][4][D]; __shared__ u32 mins[2][4][D/2], maxs[2][4][D/2];
  const int w = threadIdx.x >> 5, lane = lane_id(), half = lane >> 4, chunk = lane & 15, d = threadIdx.x;
  u32 bh, x; split(cta, p.value_chunks, p, p.gather_heads_first, bh, x);
  const u16* v = head_start(p.v, p.v_b, p.v_h, bh, p.H);
  float amax = 0.f, mmax = 0.f; bool bad = false;
  const int first = x * VALUE_CHUNK, n = min(VALUE_CHUNK, p.NB - first);
  for(int i = 0; i < n; i++){
    const int block = first + i, real = min(BLOCK, p.S_kv - block * BLOCK), buf = i & 1;
    u32 r[16][4]; load_rows(r, p, bh, v, block);
    float s[8]; u32 mn[4], mx[4];
#pragma unroll
    for(int e = 0; e < 4; e++){ s[2*e] = s[2*e+1] = 0.f; mn[e] = POS_INF2; mx[e] = POS_INF2 | 0x80008000u; }
#pragma unroll
    for(int t = 0; t < 16; t++)
#pragma unroll
      for(int e = 0; e < 4; e++){
        mn[e] = min2(mn[e], r[t][e]); mx[e] = max2(mx[e], r[t][e]); // rows past the end repeat the last one
        if(real == BLOCK || 32*w + 16*half + t < real){ s[2*e] += lo(r[t][e]); s[2*e+1] += hi(r[t][e]); } }
#pragma unroll
    for(int e = 0; e < 4; e++){
      s[2*e] += __shfl_xor_sync(~0u, s[2*e], 16); s[2*e+1] += __shfl_xor_sync(~0u, s[2*e+1], 16);
      mn[e] = min2(mn[e], __shfl_xor_sync(~0u, mn[e], 16)); mx[e] = max2(mx[e], __shfl_xor_sync(~0u, mx[e], 16)); }
    if(half == 0){
      *(float4*)&sums[buf][w][8*chunk] = make_float4(s[0], s[1], s[2], s[3]); *(float4*)&sums[buf][w][8*chunk+4] = make_float4(s[4], s[5], s[6], s[7]);
      *(uint4*)&mins[buf][w][4*chunk] = make_uint4(mn[0], mn[1], mn[2], mn[3]); *(uint4*)&maxs[buf][w][4*chunk] = make_uint4(mx[0], mx[1], mx[2], mx[3]); }
    __syncthreads(); // two buffers: the writes of block i+2 come after the barrier of i+1, behind all reads of i
    const float sum = (sums[buf][0][d] + sums[buf][1][d]) + (sums[buf][2][d] + sums[buf][3][d]), mean = p.demean ? sum / (float)real : 0.f;
    const u32 lo2 = min2(min2(mins[buf][0][d>>1], mins[buf][1][d>>1]), min2(mins[buf][2][d>>1], mins[buf][3][d>>1]));
    const u32 hi2 = max2(max2(maxs[buf][0][d>>1], maxs[buf][1][d>>1]), max2(maxs[buf][2][d>>1], maxs[buf][3][d>>1]));
    const float low = d & 1 ? hi(lo2) : lo(lo2), high = d & 1 ? hi(hi2) : lo(hi2);
    bad |= !finite(sum);
    amax = fmaxf(amax, fmaxf(high - mean, mean - low)); mmax = fmaxf(mmax, fabsf(mean));
    p.block_mean[((u64)bh * p.NB + block) * D + d] = mean;
  }
  float* o = p.value_partial + ((u64)bh * p.value_chunks + x) * (2 * D) + d;
  o[0] = bad ? __int_as_float(0x7f800000) : amax; o[D] = mmax;
}

DEV float stored_mean(float mean, float inv){ return h2f(f2h(mean * inv)); } // the value that `means` holds, as float
DEV float residual(float v, float inv, float stored){ return fmaf(v, inv, -stored); } // in units of v_scale
DEV void load8(u32 (&r)[2], const u16* p){
#if VEC >= 8
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1},[%2];" : "=r"(r[0]), "=r"(r[1]) : "l"(p));
#elif VEC == 4
  asm volatile("ld.global.nc.u32 %0,[%1];" : "=r"(r[0]) : "l"(p)); asm volatile("ld.global.nc.u32 %0,[%1];" : "=r"(r[1]) : "l"(p + 2));
#else
#pragma unroll
  for(int i = 0; i < 2; i++){
    u16 a, b;
    asm volatile("ld.global.nc.u16 %0,[%1];" : "=h"(a) : "l"(p + 2*i)); asm volatile("ld.global.nc.u16 %0,[%1];" : "=h"(b) : "l"(p + 2*i + 1));
    r[i] = a | ((u32)b << 16); }
#endif
}
DEV void write_means(const Params& p, u32 cta){ // 16 blocks of one head, thread = channel
  const u32 n = p.NB16 >> 4, bh = cta / n, group = cta - bh * n, d = threadIdx.x;
  const float inv = 1.f / p.v_scale[bh * D + d];
  u32 h[8];
#pragma unroll
  for(int slot = 0; slot < 16; slot++){
    const int block = 16*group + 4*((slot & 1) + 2*(slot >> 3)) + ((slot >> 1) & 3); // the order in which the attention kernel's A fragment holds its row sums
    const u32 b = block < p.NB ? f2h(p.block_mean[((u64)bh * p.NB + block) * D + d] * inv) : 0;
    h[slot >> 1] = slot & 1 ? h[slot >> 1] | (b << 16) : b;
  }
  uint4* o = (uint4*)p.means + ((u64)(bh * D + d) * p.NB16 + 16*group) / 8;
  o[0] = make_uint4(h[0], h[1], h[2], h[3]); o[1] = make_uint4(h[4], h[5], h[6], h[7]);
}
constexpr int VALUE_BLOCKS = 4; // per CTA
DEV void write_value(const Params& p, u32 cta){
  __shared__ uint4 tile[2][D][8]; // [channel][16 keys], column XOR (channel >> 2) & 7; two buffers, so that one barrier per block is enough
  const u32 places = (p.NB + VALUE_BLOCKS - 1) / VALUE_BLOCKS;
  const int w = threadIdx.x >> 5, lane = lane_id(); // warp w has keys 32 w .. of each block, a lane 4 channels of all of them
  u32 bh, place; split(cta, places, p, p.gather_heads_first, bh, place);
  const u16* v = head_start(p.v, p.v_b, p.v_h, bh, p.H) + 4*lane;
  const int* pi = p.permutation ? p.permutation + (i64)bh * p.S_kv : nullptr;
  const int first = place * VALUE_BLOCKS, stop = min(first + VALUE_BLOCKS, p.NB);
  float inv[4];
  { const float4 s = load_f4(p.v_scale + bh * D + 4*lane); inv[0] = 1.f/s.x; inv[1] = 1.f/s.y; inv[2] = 1.f/s.z; inv[3] = 1.f/s.w; }
  auto source = [&](int block){ const int s = min(block * BLOCK + 32*w + lane, p.S_kv - 1); return pi ? pi[s] : s; };
  u32 r[2][16][2];
  auto fetch = [&](u32 (&b)[16][2], int s, int half){
#pragma unroll
    for(int i = 0; i < 16; i++) load8(b[i], v + (i64)__shfl_sync(~0u, s, half * 16 + i) * p.v_s); };
  auto convert = [&](const u32 (&b)[16][2], const float (&mean)[4], int block, int half){
    const int real = p.S_kv - block * BLOCK - 32*w - 16*half; // of these 16 keys
#pragma unroll
    for(int e = 0; e < 4; e++){
      u32 c2[8]; // two keys each
#pragma unroll
      for(int i = 0; i < 8; i++){
        float x = e & 1 ? hi(b[2*i][e>>1]) : lo(b[2*i][e>>1]), y = e & 1 ? hi(b[2*i+1][e>>1]) : lo(b[2*i+1][e>>1]);
        x = residual(x, inv[e], mean[e]); y = residual(y, inv[e], mean[e]);
        if(real < 16){ if(2*i >= real) x = 0.f; if(2*i + 1 >= real) y = 0.f; }
        u16 z; asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(z) : "f"(y), "f"(x)); c2[i] = z;
      }
      // position 4 c + i of 16 holds key (2c, 2c+1, 8+2c, 9+2c)[i]
      tile[block & 1][4*lane + e][(2*w + half) ^ (lane & 7)] = make_uint4(__byte_perm(c2[0], c2[4], 0x5410), __byte_perm(c2[1], c2[5], 0x5410),
                                                                       __byte_perm(c2[2], c2[6], 0x5410), __byte_perm(c2[3], c2[7], 0x5410));
    } };
  int s = source(first);
  fetch(r[0], s, 0); fetch(r[1], s, 1);
  s = source(first + 1);
  for(int block = first; block < stop; block++){
    float mean[4];
    { const float4 m = load_f4(p.block_mean + ((u64)bh * p.NB + block) * D + 4*lane);
      mean[0] = stored_mean(m.x, inv[0]); mean[1] = stored_mean(m.y, inv[1]); mean[2] = stored_mean(m.z, inv[2]); mean[3] = stored_mean(m.w, inv[3]); }
    const bool more = block + 1 < stop;
    convert(r[0], mean, block, 0); if(more) fetch(r[0], s, 0);
    convert(r[1], mean, block, 1); if(more) fetch(r[1], s, 1);
    s = source(block + 2);
    __syncthreads();
#pragma unroll
    for(int i = 0; i < 8; i++){
      const int row = 16*i + (threadIdx.x >> 3), col = threadIdx.x & 7;
      *(uint4*)((u8*)p.v8 + ((u64)bh * D + row) * p.S_kv_pad + block * BLOCK + 16*col) = tile[block & 1][row][col ^ ((row >> 2) & 7)];
    }
  }
}
#endif

// --- the launches: one for all statistics, one for all operands, so that the tail of one kind is filled by the next ----------------------
extern "C" __global__ void __launch_bounds__(128, CTAS) stats(const __grid_constant__ Params p){
  join_the_chain();
  if(blockIdx.x == 0 && threadIdx.x == 0) *p.flag = 0; // `finish` and `write` raise it
  const u32 values = (u32)p.B * p.H * p.value_chunks;
#if PRECISE
  if(blockIdx.x < values) value_check(p, blockIdx.x); else
#else
  if(blockIdx.x < values) value_stats(p, blockIdx.x); else
#endif
  key_stats(p, blockIdx.x - values);
}
extern "C" __global__ void __launch_bounds__(128, WRITE_CTAS) write(const __grid_constant__ Params p){
  join_the_chain();
  const u32 BH = p.B * p.H;
  const u32 keys = BH * ((p.S_kv_pad + WRITE_ROWS - 1) / WRITE_ROWS);
  u32 i = blockIdx.x;
  if(i < keys){ write_key(p, keys - 1 - i); return; } // backwards: what `stats` read last is still in L2
  i -= keys;
#if PRECISE
  write_query(p, i);
#else
  const u32 values = BH * ((p.NB + VALUE_BLOCKS - 1) / VALUE_BLOCKS), queries = BH * ((p.S_q_pad + WRITE_ROWS - 1) / WRITE_ROWS);
  if(i < values){ write_value(p, i); return; }
  i -= values;
  if(i < queries) write_query(p, i); else write_means(p, i - queries);
#endif
}

// --- means and scales from the partials ----------------------------------------------------------------------------------------------
#if PRECISE
DEV void finish_value(const Params& p, u32 bh){
  for(int i = threadIdx.x; i < p.value_chunks; i += 1024)
    if(!finite(p.value_partial[(u64)bh * p.value_chunks + i])) atomicOr(p.flag, FLAG_NOT_FINITE);
}
#else
DEV void finish_value(const Params& p, u32 bh){
  __shared__ float a[8][D], b[8][D];
  const int d = threadIdx.x & 127, part = threadIdx.x >> 7;
  float amax = 0.f, mmax = 0.f; const float* o = p.value_partial + (u64)bh * p.value_chunks * (2 * D) + d;
#pragma unroll 4
  for(int i = part; i < p.value_chunks; i += 8){ amax = fmaxf(amax, o[(u64)i * (2*D)]); mmax = fmaxf(mmax, o[(u64)i * (2*D) + D]); }
  a[part][d] = amax; b[part][d] = mmax; __syncthreads();
  if(part == 0){
#pragma unroll
    for(int i = 1; i < 8; i++){ amax = fmaxf(amax, a[i][d]); mmax = fmaxf(mmax, b[i][d]); }
    if(!finite(amax)) atomicOr(p.flag, FLAG_NOT_FINITE);
    const float s = fmaxf(amax / 448.f, mmax / 60000.f);
    p.v_scale[bh * D + d] = s == 0.f ? 1.f : fmaxf(s, 1e-30f);
  }
}
#endif
DEV void finish_key(const Params& p, u32 bh){
  __shared__ float a[8][D], b[8][D], e[8][D];
  const int d = threadIdx.x & 127, part = threadIdx.x >> 7;
  float sum = 0.f, mn = __int_as_float(0x7f800000), mx = __int_as_float(0xff800000); const float* o = p.key_partial + (u64)bh * p.key_chunks * (3 * D) + d;
#pragma unroll 4
  for(int i = part; i < p.key_chunks; i += 8){
    const float* q = o + (u64)i * (3*D); sum += q[0]; mn = fminf(mn, q[D]); mx = fmaxf(mx, q[2*D]); }
  a[part][d] = sum; b[part][d] = mn; e[part][d] = mx; __syncthreads();
  if(part == 0){
#pragma unroll
    for(int i = 1; i < 8; i++){ sum += a[i][d]; mn = fminf(mn, b[i][d]); mx = fmaxf(mx, e[i][d]); }
    if(!finite(sum)) atomicOr(p.flag, FLAG_NOT_FINITE);
    const float mean = sum / (float)p.S_kv;
    p.key_mean[bh * D + d] = mean;
    a[0][d] = fmaxf(mx - mean, mean - mn);
  }
  __syncthreads();
  if(threadIdx.x < 32){
    float m = fmaxf(fmaxf(a[0][d], a[0][d+32]), fmaxf(a[0][d+64], a[0][d+96]));
#pragma unroll
    for(int s = 1; s < 32; s *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, s));
    if(d == 0) p.k_scale[bh] = fmaxf(m * INV_SQRT_D / 127.f, 1e-10f);
  }
}
extern "C" __global__ void __launch_bounds__(1024) finish(const __grid_constant__ Params p){
  join_the_chain();
  if(blockIdx.x & 1) finish_value(p, blockIdx.x >> 1); else finish_key(p, blockIdx.x >> 1);
}
