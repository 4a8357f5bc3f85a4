// For kernels that read bfloat16 or half tensors [B, H, S, 128] in place, whatever their strides but the last, which is 1.
//
// Switches: -DINPUT_FP16=1 reads half instead of bfloat16; -DVEC, the bytes to which every row is aligned: 16, 8, 4 or 2.
#pragma once
#include "common_sm90.cuh"

#ifndef INPUT_FP16
#define INPUT_FP16 0
#endif
#ifndef VEC
#define VEC 16
#endif

constexpr int HEAD_DIM = 128;

// ---- threads ------------------------------------------------------------------------------------------------------------------

DEVICE u32 lane_id() { return threadIdx.x & 31; }
DEVICE u32 warp_id() { return threadIdx.x >> 5; }

// Lets the next kernel be brought in, then waits until the one before has ended and its writes are visible. Every kernel that is
// launched to begin early calls this before it touches memory.
DEVICE void wait_for_previous() {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- the input type -----------------------------------------------------------------------------------------------------------

// A pair is two neighbouring channels in a register.
#if INPUT_FP16
#define INPUT_TYPE "f16"  // in the names of PTX instructions

DEVICE float input_to_float(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

DEVICE float input_low(u32 pair) { return input_to_float(static_cast<u16>(pair & 0xffff)); }
DEVICE float input_high(u32 pair) { return input_to_float(static_cast<u16>(pair >> 16)); }

// Rounded to nearest even; at most the largest half.
DEVICE u16 float_to_input(float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(fminf(fmaxf(x, -65504.f), 65504.f)));
  return y;
}
#else
#define INPUT_TYPE "bf16"

DEVICE float input_to_float(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }
DEVICE float input_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float input_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Rounded to nearest even.
DEVICE u16 float_to_input(float x) {
  u16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
#endif

constexpr u32 PAIR_SIGNS = 0x80008000u;  // sign bits of a pair

DEVICE u32 pack_16(u16 low, u16 high) { return low | static_cast<u32>(high) << 16; }

DEVICE float infinity() { return __int_as_float(0x7f800000); }
DEVICE bool is_finite(float x) { return fabsf(x) <= 3.402823466e38f; }

// ---- reading a tensor ---------------------------------------------------------------------------------------------------------

// Start of one head; bh = batch * heads + head, strides in elements.
DEVICE const u16* head_start(const u16* tensor, i64 stride_b, i64 stride_h, u32 bh, int heads) {
  const u32 batch = bh / heads;
  return tensor + static_cast<i64>(batch) * stride_b + static_cast<i64>(bh - batch * heads) * stride_h;
}

// What one block works on: one of the parts of one head's sequence.
struct Part {
  u32 bh, index;
};

// The part of block number `block`. Neighbouring blocks take the parts of a head or, if `heads_first`, the same part of all heads:
// whichever lie side by side in memory.
DEVICE Part part_of_block(u32 block, u32 parts, u32 batch_heads, int heads_first) {
  if (heads_first) {
    const u32 index = block / batch_heads;
    return {block - index * batch_heads, index};
  }
  const u32 bh = block / parts;
  return {bh, block - bh * parts};
}

// 2 * WORDS neighbouring channels of a row, with the widest loads that VEC allows. STREAM: one load that reads all 8 or 16 bytes
// leaves no copy in L1; of narrower ones, L1 has the rest of the sector.
template <bool STREAM = true, int WORDS>
DEVICE void load_channels(u32 (&pairs)[WORDS], const u16* channels) {
  static_assert(WORDS == 2 || WORDS == 4, "8 or 16 bytes");
  constexpr int BYTES = VEC < 4 * WORDS ? VEC : 4 * WORDS;
  if constexpr (BYTES == 16) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                 : "l"(channels));
  } else if constexpr (BYTES == 8 && WORDS == 2 && STREAM) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(pairs[0]), "=r"(pairs[1]) : "l"(channels));
  } else if constexpr (BYTES == 8) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 2)
      asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(pairs[i]), "=r"(pairs[i + 1]) : "l"(channels + 2 * i));
  } else if constexpr (BYTES == 4 && WORDS == 2) {  // apart from the loop below, which would be unrolled too late for write_value
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(pairs[0]) : "l"(channels));
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(pairs[1]) : "l"(channels + 2));
  } else if constexpr (BYTES == 4) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(pairs[i]) : "l"(channels + 2 * i));
  } else {
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      u16 low, high;
      asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(low) : "l"(channels + 2 * i));
      asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(high) : "l"(channels + 2 * i + 1));
      pairs[i] = pack_16(low, high);
    }
  }
}

// ---- vectors of memory that the kernels own: aligned, contiguous --------------------------------------------------------------

template <class T>
DEVICE T load_as(const void* address) { return *static_cast<const T*>(address); }

template <class T>
DEVICE void store_as(void* address, T value) { *static_cast<T*>(address) = value; }
