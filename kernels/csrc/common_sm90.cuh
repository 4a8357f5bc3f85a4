// PTX wrappers for Hopper (sm_90a): mbarrier, TMA, wgmma, packed half. No host code and no other header.
//
// Suffixes say where a value lives: _gmem, _smem (a 32-bit shared-memory address), _rmem (registers).
#pragma once

#define DEVICE __device__ __forceinline__

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// ---- shared memory and barriers -----------------------------------------------------------------------------------------------

DEVICE u32 smem_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

DEVICE void mbarrier_init(u32 barrier_smem, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier_smem), "r"(arrivals));
}

DEVICE void mbarrier_expect_bytes(u32 barrier_smem, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_smem), "r"(bytes) : "memory");
}

DEVICE void mbarrier_arrive(u32 barrier_smem) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier_smem) : "memory");
}

// Arrives at the same barrier of another block of the cluster. Without .release.cluster: that form puts a MEMBAR.GPU into the
// caller, and nothing but wgmma reads has to be ordered here (they are complete once wgmma_wait has returned).
DEVICE void mbarrier_arrive_cluster(u32 barrier_smem, u32 block_rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier_smem), "r"(block_rank)
      : "memory");
}

template <class T>
DEVICE T shared_load(u32 address_smem) { return *static_cast<const T*>(__cvta_shared_to_generic(address_smem)); }

template <class T>
DEVICE void shared_store(u32 address_smem, T value) { *static_cast<T*>(__cvta_shared_to_generic(address_smem)) = value; }

// Returns once the phase of this parity is complete. A barrier that was never used answers parity 1 at once.
DEVICE void mbarrier_wait(u32 barrier_smem, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n}" ::"r"(barrier_smem), "r"(parity)
      : "memory");
}

DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Makes ordinary stores to shared memory visible to TMA and wgmma; a barrier must follow.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int THREADS>
DEVICE void named_barrier_sync(int id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory"); }

template <int THREADS>
DEVICE void named_barrier_arrive(int id) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory"); }

DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// threadIdx.x, read anew at every call.
DEVICE u32 thread_index() {
  u32 index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// blockIdx.x, read anew at every call.
DEVICE u32 block_index() {
  u32 index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

DEVICE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

template <int REGISTERS>
DEVICE void registers_shrink_to() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

template <int REGISTERS>
DEVICE void registers_grow_to() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// ---- TMA ----------------------------------------------------------------------------------------------------------------------

struct __align__(64) TensorMap { char opaque[128]; };  // CUtensorMap, encoded on the host

// Copies one box to shared memory. Elements outside the tensor arrive as zeros and count towards the bytes of the barrier.
DEVICE void tma_load_3d(u32 target_smem, const TensorMap* map, int x, int y, int z, u32 barrier_smem) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
          target_smem), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier_smem)
      : "memory");
}

// The same box for every block of the cluster in `block_mask`, at the same shared-memory offset, signalling each block's barrier.
DEVICE void tma_load_3d_multicast(u32 target_smem, const TensorMap* map, int x, int y, int z, u32 barrier_smem, u16 block_mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(target_smem), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier_smem), "h"(block_mask)
      : "memory");
}

DEVICE void tma_load_4d_multicast(u32 target_smem, const TensorMap* map, int x, int y, int z, int w, u32 barrier_smem,
                                  u16 block_mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(target_smem), "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier_smem),
      "h"(block_mask)
      : "memory");
}

// ---- wgmma --------------------------------------------------------------------------------------------------------------------

// Descriptor of a K-major tile whose rows are ROW_BYTES long and swizzled over ROW_BYTES (as TMA writes them): 8-row groups follow
// one another. Advancing along a row by n bytes adds n / 16.
template <int ROW_BYTES>
DEVICE u64 matrix_descriptor(u32 tile_smem) {
  static_assert(ROW_BYTES == 128 || ROW_BYTES == 32, "swizzle modes used here");
  constexpr u64 swizzle = ROW_BYTES == 128 ? 1 : 3;
  constexpr u64 group_stride = 8 * ROW_BYTES / 16;
  return static_cast<u64>((tile_smem & 0x3FFFF) >> 4) | (1ull << 16) | (group_stride << 32) | (swizzle << 62);
}

// Descriptor of an MN-major tile: rows of 64 16-bit elements, 128-byte swizzle (as TMA writes them), one row a place along k; the next
// 64 elements lie PLANE_BYTES behind. Advancing by n rows adds 8 n.
template <int PLANE_BYTES>
DEVICE u64 transposed_descriptor(u32 tile_smem) {
  constexpr u64 plane_stride = PLANE_BYTES / 16, group_stride = 8 * 128 / 16;
  return static_cast<u64>((tile_smem & 0x3FFFF) >> 4) | (plane_stride << 16) | (group_stride << 32) | (1ull << 62);
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int GROUPS_IN_FLIGHT>
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS_IN_FLIGHT) : "memory"); }

// Pins an array to its registers at this point: code on one side of a wgmma issue or wait cannot be moved to the other side.
template <int N>
DEVICE void pin(u32 (&values_rmem)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(values_rmem[i])::"memory");
}

template <int N>
DEVICE void pin(float (&values_rmem)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(values_rmem[i])::"memory");
}

// Zero in place. A plain assignment to one element of a wgmma accumulator makes the compiler rename the register and move it
// inside the wgmma stage, which serializes the pipeline (ptxas C7511, C7519).
DEVICE void zero_in_place(float& value_rmem) { asm volatile("mov.f32 %0, 0f00000000;" : "+f"(value_rmem)::"memory"); }

// Operands %0..%63 and the registers behind them, in rows of sixteen.
#define PTX_00_15 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define PTX_16_31 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PTX_32_47 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define PTX_48_63 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PTX_32 PTX_00_15 ", " PTX_16_31
#define PTX_64 PTX_32 ", " PTX_32_47 ", " PTX_48_63
#define INOUT_4(type, d, i) type(d[i]), type(d[i + 1]), type(d[i + 2]), type(d[i + 3])
#define INOUT_16(type, d, i) INOUT_4(type, d, i), INOUT_4(type, d, i + 4), INOUT_4(type, d, i + 8), INOUT_4(type, d, i + 12)
#define INOUT_32(type, d, i) INOUT_16(type, d, i), INOUT_16(type, d, i + 16)
#define INOUT_64(type, d) INOUT_32(type, d, 0), INOUT_32(type, d, 32)

// d[64 x 128] (s32) = (accumulate ? d : 0) + a[64 x 32] b[128 x 32]^T, both INT8 in shared memory.
DEVICE void wgmma_m64n128k32_s8(u32 (&d_rmem)[64], u64 a_descriptor, u64 b_descriptor, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" PTX_64 "}, %64, %65, p;\n}"
      : INOUT_64("+r", d_rmem)
      : "l"(a_descriptor), "l"(b_descriptor), "r"(accumulate));
}

// d[64 x 128] (s32) = (accumulate ? d : 0) + a[64 x 32] b[128 x 32]^T, both INT8, a in registers.
DEVICE void wgmma_m64n128k32_s8(u32 (&d_rmem)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 b_descriptor, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" PTX_64 "}, {%64, %65, %66, %67}, %68, p;\n}"
      : INOUT_64("+r", d_rmem)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_descriptor), "r"(accumulate));
}

// d[64 x 136] (FP32) = (accumulate ? d : 0) + a[64 x 32] b[136 x 32]^T, both E4M3, a in registers.
DEVICE void wgmma_m64n136k32_e4m3(float (&d_rmem)[68], u32 a0, u32 a1, u32 a2, u32 a3, u64 b_descriptor, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %73, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {" PTX_64 ", %64, %65, %66, %67}, "
      "{%68, %69, %70, %71}, %72, p, 1, 1;\n}"
      : INOUT_64("+f", d_rmem), INOUT_4("+f", d_rmem, 64)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_descriptor), "r"(accumulate));
}

// d[64 x 128] (FP32, the first 64 registers) += a[64 x 16] b[128 x 16]^T, both half, a in registers.
template <int N>
DEVICE void wgmma_m64n128k16_f32_f16(float (&d_rmem)[N], u32 a0, u32 a1, u32 a2, u32 a3, u64 b_descriptor) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" PTX_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
      : INOUT_64("+f", d_rmem)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_descriptor), "r"(1));
}

// d[64 x 128] (FP32) += a[64 x 16] b[16 x 128], half or bfloat16, a in registers, b MN-major.
template <bool HALF>
DEVICE void wgmma_m64n128k16_transposed(float (&d_rmem)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 b_descriptor) {
#define WGMMA(type)                                                                                                                \
  asm volatile(                                                                                                                    \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" PTX_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"         \
      : INOUT_64("+f", d_rmem)                                                                                                     \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_descriptor))
  if constexpr (HALF)
    WGMMA("f16");
  else
    WGMMA("bf16");
#undef WGMMA
}

// ---- packed half and other arithmetic -------------------------------------------------------------------------------------------

DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float half_low(u32 pair) {
  float y;
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\ncvt.f32.f16 %0, lo;\n}" : "=f"(y) : "r"(pair));
  return y;
}

DEVICE float half_high(u32 pair) {
  float y;
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\ncvt.f32.f16 %0, hi;\n}" : "=f"(y) : "r"(pair));
  return y;
}

DEVICE u32 pack_half(float low, float high) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

DEVICE u32 broadcast_half(float x) {
  u32 y;
  asm("{\n.reg .b16 h;\ncvt.rn.f16.f32 h, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(y) : "f"(x));
  return y;
}

DEVICE u32 pack_bfloat16(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// Two E4M3 bytes, rounded to nearest even, at most 448.
DEVICE u32 pack_e4m3(float low, float high) {
  u32 y;
  asm("{\n.reg .b16 pair;\ncvt.rn.satfinite.e4m3x2.f32 pair, %1, %2;\ncvt.u32.u16 %0, pair;\n}" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

DEVICE u32 half2_max(u32 a, u32 b) {
  u32 y;
  asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

DEVICE u32 half2_fma(u32 a, u32 b, u32 c) {
  u32 y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

DEVICE u32 half2_fma_relu(u32 a, u32 b, u32 c) {
  u32 y;
  asm("fma.rn.relu.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

DEVICE u32 broadcast_low_16(u32 x) { return __byte_perm(x, x, 0x1010); }
DEVICE int signed_low_16(u32 x) { return static_cast<short>(x & 0xffff); }
DEVICE int signed_high_16(u32 x) { return static_cast<int>(x) >> 16; }

// ---- rows of an accumulator ---------------------------------------------------------------------------------------------------

// Over the four threads that share a row of an accumulator.
DEVICE float sum_over_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Two outputs as bfloat16 or, clamped to its range, half.
template <bool HALF>
DEVICE u32 pack_output(float low, float high) {
  auto clamped = [](float x) { return fminf(fmaxf(x, -65504.f), 65504.f); };
  return HALF ? pack_half(clamped(low), clamped(high)) : pack_bfloat16(low, high);
}
