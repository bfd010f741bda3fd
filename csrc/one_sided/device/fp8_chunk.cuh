// Expert outputs as scaled FP8 (core/scaled_fp8.h): how the lanes of a warp quantise them. The
// bytes are those of one_sided/fp8_rows.cpp.
#pragma once

#include <cstdint>

#include "core/scaled_fp8.h"
#include "one_sided/device/e4m3.cuh"
#include "one_sided/device/routing.cuh"
#include "transport/device/row_sum.cuh"

namespace moe_ep::one_sided {

// Of a normal number whose reciprocal is normal, correctly rounded. As the compiler divides 1 by a
// number, without its look at the others: a branch there keeps blocks from being worked on
// together.
__device__ inline float reciprocal_of_normal(float x) {
  float estimate;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(estimate) : "f"(x));
  return __fmaf_rn(estimate, -__fmaf_rn(x, estimate, -1.0f), estimate);
}

__device__ inline Fp8Scale fp8_scale_by_hardware(uint32_t largest) {
  const float scale = fp8_finite_scale(largest);
  return fp8_scale_of_block(largest, scale, reciprocal_of_normal(scale));
}

// What the chunks of 16 bytes of a row become that one lane has loaded. Zeros stand behind the
// row's end. Step by step for all chunks, since each alone is a long chain.
template <RowType kType, int kChunks>
struct Fp8Chunks {
  static constexpr int kElements = Chunk<kType>::kElements;               // of a chunk
  static constexpr int kLanes = static_cast<int>(kFp8Block) / kElements;  // that share a scale
  static constexpr int kWords = kElements / 4;

  float scale[kChunks];
  uint32_t codes[kChunks][kWords];

  // By all lanes of a warp.
  __device__ explicit Fp8Chunks(const uint4 (&chunk)[kChunks]) {
    uint32_t largest[kChunks];
    for_each([&](int c) { largest[c] = largest_of(chunk[c]); });
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      for_each([&](int c) {
        largest[c] = larger(largest[c], __shfl_xor_sync(kAllLanes, largest[c], distance));
      });
    }
    for_each([&](int c) {
      const Fp8Scale block = fp8_scale_by_hardware(as_float_bits(largest[c]));
      scale[c] = block.scale;
      float number[kElements];
      Chunk<kType>::unpack(number, chunk[c]);
#pragma unroll
      for (int i = 0; i < kElements; ++i) number[i] = __fmul_rn(number[i], block.multiplier);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const float* const n = number + 4 * w;
        codes[c][w] = pack_e4m3(n[0], n[1], n[2], n[3]) & block.keep * 0x01010101u;
      }
    });
  }
  // Of a chunk, whose first `elements` are the row's; all of them, if it is whole.
  __device__ void store_whole(int c, uint8_t* to) const {
    if constexpr (kWords == 2) {
      *reinterpret_cast<uint2*>(to) = make_uint2(codes[c][0], codes[c][1]);
    } else {
      *reinterpret_cast<uint32_t*>(to) = codes[c][0];
    }
  }
  __device__ void store(int c, uint8_t* to, int32_t elements) const {
    if (elements >= kElements) return store_whole(c, to);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i < elements) to[i] = static_cast<uint8_t>(codes[c][i / 4] >> (8 * (i % 4)));
    }
  }
  template <typename Visit>
  __device__ static void for_each(const Visit& visit) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) visit(c);
  }

 private:
  // Two elements of 16 bits to a word order like their bits, too.
  static constexpr bool kIsPair = kType != RowType::kFloat32;

  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    return kIsPair ? __vmaxu2(a, b) : max(a, b);
  }
  // Of the magnitudes, word by word.
  __device__ static uint32_t largest_of(uint4 chunk) {
    constexpr uint32_t kMagnitude = kIsPair ? 0x7FFF7FFFu : kFloatMagnitudeMask;
    uint32_t largest = chunk.x & kMagnitude;
#pragma unroll
    for (int i = 1; i < 4; ++i) largest = larger(largest, word_of(chunk, i) & kMagnitude);
    return largest;
  }
  __device__ static uint32_t as_float_bits(uint32_t largest) {
    if constexpr (kIsPair) {
      float low, high;
      Chunk<kType>::unpack(largest, low, high);
      return max(float_bits(low), float_bits(high));
    } else {
      return largest;
    }
  }
};

}  // namespace moe_ep::one_sided
