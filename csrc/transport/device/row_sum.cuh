// Rows of the three element types, 16 bytes at a time: unpacked and added in float32, and rounded
// at the end. Sums start from +0.0 and add rows in the order given. The bits are those of
// transport/reduce_rows.cpp: the hardware rounds as IEEE 754 says, and its NaNs are replaced by
// ours.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/float_formats.h"
#include "core/rows.h"

namespace moe_ep {

// Conversions to 16 bits give 0x7FFF for any NaN. No other value is greater as a signed number, and
// ours is greater than infinity: so the lesser of the two is right, in both halves of a word.
template <uint16_t kNan>
__device__ uint32_t with_canonical_nans(uint32_t pair) {
  static_assert(kNan == kBFloat16Nan || kNan == kFloat16Nan);
  return __vmins2(pair, kNan * 0x00010001u);
}

// The words of a chunk, for loops that are unrolled.
__device__ inline uint32_t word_of(uint4 chunk, int i) {
  return i == 0 ? chunk.x : i == 1 ? chunk.y : i == 2 ? chunk.z : chunk.w;
}

// Where the sum of a token starts: a sum that must not be formed is NaN from the start.
__device__ inline float start_of_sum(bool valid) {
  return valid ? 0.0f : float_from_bits(kFloat32Nan);
}

template <int kElements>
__device__ void start(float (&sum)[kElements], bool valid) {
#pragma unroll
  for (float& element : sum) element = start_of_sum(valid);
}

// 16 bytes of a row. `begin` is `add` to sums of +0.0: it makes +0 of -0, in the 16 bit types two
// at a time. `unpack` leaves zeros as they are.
template <RowType kType>
struct Chunk;

template <>
struct Chunk<RowType::kFloat32> {
  using Element = uint32_t;  // as bits
  static constexpr int kElements = 4;
  static constexpr Element kNan = kFloat32Nan;

  __device__ static void unpack(float (&number)[kElements], uint4 chunk) {
#pragma unroll
    for (int i = 0; i < 4; ++i) number[i] = __uint_as_float(word_of(chunk, i));
  }
  __device__ static void begin(float (&sum)[kElements], uint4 chunk) {
    start(sum, true);
    add(sum, chunk);
  }
  __device__ static void add(float (&sum)[kElements], uint4 chunk) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = __fadd_rn(sum[i], __uint_as_float(word_of(chunk, i)));
  }
  __device__ static uint4 round(const float (&sum)[kElements]) {
    return make_uint4(bits(sum[0]), bits(sum[1]), bits(sum[2]), bits(sum[3]));
  }

 private:
  __device__ static uint32_t bits(float sum) {
    return sum != sum ? kFloat32Nan : __float_as_uint(sum);
  }
};

// Two numbers of 16 bits in a word. `plus_zero` adds +0.0 to both.
struct Float16Pair {
  static constexpr uint16_t kNan = kFloat16Nan;

  __device__ static void unpack(uint32_t word, float& low, float& high) {
    asm("{.reg .f16 a,b; mov.b32 {a,b},%2; cvt.f32.f16 %0,a; cvt.f32.f16 %1,b;}"
        : "=f"(low), "=f"(high)
        : "r"(word));
  }
  __device__ static uint32_t plus_zero(uint32_t word) {
    uint32_t sum;
    asm("add.rn.f16x2 %0,%1,%2;" : "=r"(sum) : "r"(word), "r"(0));
    return sum;
  }
  __device__ static uint32_t round(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
  }
};

struct BFloat16Pair {
  static constexpr uint16_t kNan = kBFloat16Nan;

  __device__ static void unpack(uint32_t word, float& low, float& high) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xFFFF0000u);
  }
  __device__ static uint32_t plus_zero(uint32_t word) {
    constexpr uint32_t kOnes = 0x3F803F80;  // the addition alone came with compute capability 9.0
    uint32_t sum;
    asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(sum) : "r"(word), "r"(kOnes), "r"(0));
    return sum;
  }
  __device__ static uint32_t round(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
  }
};

template <typename Pair>
struct PairChunk {
  using Element = uint16_t;
  static constexpr int kElements = 8;
  static constexpr Element kNan = Pair::kNan;

  __device__ static void unpack(uint32_t word, float& low, float& high) {
    Pair::unpack(word, low, high);
  }
  __device__ static void unpack(float (&number)[kElements], uint4 chunk) {
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack(word_of(chunk, i), number[2 * i], number[2 * i + 1]);
  }
  __device__ static void begin(float (&sum)[kElements], uint4 chunk) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unpack(Pair::plus_zero(word_of(chunk, i)), sum[2 * i], sum[2 * i + 1]);
    }
  }
  __device__ static void add(float (&sum)[kElements], uint4 chunk) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float low, high;
      unpack(word_of(chunk, i), low, high);
      sum[2 * i] = __fadd_rn(sum[2 * i], low);
      sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], high);
    }
  }
  __device__ static uint4 round(const float (&sum)[kElements]) {
    return make_uint4(rounded(sum[0], sum[1]), rounded(sum[2], sum[3]), rounded(sum[4], sum[5]),
                      rounded(sum[6], sum[7]));
  }

 private:
  __device__ static uint32_t rounded(float low, float high) {
    return with_canonical_nans<kNan>(Pair::round(low, high));
  }
};

template <>
struct Chunk<RowType::kFloat16> : PairChunk<Float16Pair> {};
template <>
struct Chunk<RowType::kBFloat16> : PairChunk<BFloat16Pair> {};

}  // namespace moe_ep
