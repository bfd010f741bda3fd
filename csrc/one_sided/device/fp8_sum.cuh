// Rows that are summed as if they had travelled as scaled FP8: who sums them quantises them first
// (core/scaled_fp8.h), which gives the same bits as if their owner had.
#pragma once

#include <cstdint>

#include "one_sided/device/e4m3.cuh"
#include "one_sided/device/fp8_chunk.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/token_rows.cuh"
#include "transport/device/row_sum.cuh"

namespace moe_ep::one_sided {

// Of 16 bytes of 16-bit elements, the first `bytes` of which are the row's; zeros stand behind, as
// in a block that the end of a row cuts short.
__device__ inline uint4 cut_chunk(uint4 chunk, int32_t bytes) {
  const auto word = [](uint32_t value, int32_t left) {
    if (left == 2) return value & 0xFFFFu;
    return left > 0 ? value : 0u;
  };
  return make_uint4(word(chunk.x, bytes), word(chunk.y, bytes - 4), word(chunk.z, bytes - 8),
                    word(chunk.w, bytes - 12));
}

// The scales of the blocks that a warp's chunks are of: a block is 16 lanes of one chunk. Lane l of
// these works out the scale of chunk l % 8, so that the largest magnitudes of eight chunks are
// found in eight exchanges, and their scales at once.
template <RowType kType, int kChunks>
struct BlockScales {
  static constexpr int kLanes = 16;
  static_assert(kType != RowType::kFloat32 && kLanes * Chunk<kType>::kElements == kFp8Block);

  float mine;
  float multiplier;

  __device__ explicit BlockScales(const uint4 (&chunk)[kChunks]) {
    constexpr int kPadded = kChunks <= 1 ? 1 : kChunks <= 2 ? 2 : kChunks <= 4 ? 4 : 8;
    static_assert(kChunks <= 8);
    uint32_t most[kPadded];
#pragma unroll
    for (int c = 0; c < kPadded; ++c) most[c] = c < kChunks ? largest_of(chunk[c]) : 0;
    const auto lane = static_cast<uint32_t>(lane_id());
    int distance = 1;
#pragma unroll
    for (int left = kPadded; left > 1; left /= 2, distance *= 2) {
      const bool odd = (lane & static_cast<uint32_t>(distance)) != 0;
#pragma unroll
      for (int i = 0; i < left / 2; ++i) {
        const uint32_t keep = odd ? most[2 * i + 1] : most[2 * i];
        const uint32_t give = odd ? most[2 * i] : most[2 * i + 1];
        most[i] = __vmaxu2(keep, __shfl_xor_sync(kAllLanes, give, distance));
      }
    }
#pragma unroll
    for (; distance < kLanes; distance *= 2) {
      most[0] = __vmaxu2(most[0], __shfl_xor_sync(kAllLanes, most[0], distance));
    }
    float low, high;
    Chunk<kType>::unpack(most[0], low, high);
    const Fp8Scale block = fp8_scale_by_hardware(max(float_bits(low), float_bits(high)));
    mine = block.scale;
    multiplier = block.multiplier;
  }
  __device__ float scale_of(int c) const { return __shfl_sync(kAllLanes, mine, source(c)); }
  __device__ float multiplier_of(int c) const {
    return __shfl_sync(kAllLanes, multiplier, source(c));
  }

 private:
  __device__ static int source(int c) { return (lane_id() & kLanes) + c; }
  __device__ static uint32_t largest_of(uint4 chunk) {
    constexpr uint32_t kMagnitude = 0x7FFF7FFFu;
    uint32_t largest = chunk.x & kMagnitude;
#pragma unroll
    for (int i = 1; i < 4; ++i) largest = __vmaxu2(largest, word_of(chunk, i) & kMagnitude);
    return largest;
  }
};

// Adds chunk c to sum_of(c), in this order. Each chunk is 512 bytes of a row, from a block's start.
// By all lanes of a warp.
template <RowType kType, int kChunks, typename SumOf>
__device__ void add_as_fp8(const uint4 (&chunk)[kChunks], const SumOf& sum_of) {
  constexpr int kElements = Chunk<kType>::kElements;
  const BlockScales<kType, kChunks> scales(chunk);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    float (&sum)[kElements] = sum_of(c);
    const float multiplier = scales.multiplier_of(c);
    const float scale = scales.scale_of(c);
    float number[kElements];
    Chunk<kType>::unpack(number, chunk[c]);
#pragma unroll
    for (int i = 0; i < kElements; ++i) number[i] = __fmul_rn(number[i], multiplier);
#pragma unroll
    for (int w = 0; w < kElements / 4; ++w) {
      float four[4];
      const float* const n = number + 4 * w;
      // Where the scale is NaN all is NaN: so the codes need not be 0 there, as those that travel.
      unpack_e4m3(pack_e4m3(n[0], n[1], n[2], n[3]), four);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[4 * w + i] = __fmaf_rn(four[i], scale, sum[4 * w + i]);
    }
  }
}

template <RowType kType, int kRows>
__device__ void add_some_rows_as_fp8(float (&sum)[Chunk<kType>::kElements], const TokenRows& rows,
                                     int first, uint64_t offset, int32_t bytes) {
  uint4 chunk[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const auto row =
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(rows.row), first + k);
    chunk[k] = load_chunk(reinterpret_cast<const uint8_t*>(row) + offset);
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) chunk[k] = cut_chunk(chunk[k], bytes);
  const auto to_sum = [&](int) -> float (&)[Chunk<kType>::kElements] { return sum; };
  if constexpr (kRows <= 4) {
    add_as_fp8<kType>(chunk, to_sum);
  } else {  // half by half: all together need more registers than there are
    uint4 some[4];
    uint4 others[kRows - 4];
#pragma unroll
    for (int k = 0; k < 4; ++k) some[k] = chunk[k];
#pragma unroll
    for (int k = 4; k < kRows; ++k) others[k - 4] = chunk[k];
    add_as_fp8<kType>(some, to_sum);
    add_as_fp8<kType>(others, to_sum);
  }
}

template <RowType kType, int kFewest, int kMost>
__device__ void add_counted_rows_as_fp8(float (&sum)[Chunk<kType>::kElements],
                                        const TokenRows& rows, int first, int count,
                                        uint64_t offset, int32_t bytes) {
  if constexpr (kFewest == kMost) {
    add_some_rows_as_fp8<kType, kMost>(sum, rows, first, offset, bytes);
  } else {
    constexpr int kMiddle = (kFewest + kMost) / 2;
    if (count <= kMiddle) {
      add_counted_rows_as_fp8<kType, kFewest, kMiddle>(sum, rows, first, count, offset, bytes);
    } else {
      add_counted_rows_as_fp8<kType, kMiddle + 1, kMost>(sum, rows, first, count, offset, bytes);
    }
  }
}

// As add_rows; `bytes` are left of the rows, from this lane's on.
template <RowType kType>
__device__ void add_rows_as_fp8(float (&sum)[Chunk<kType>::kElements], const TokenRows& rows,
                                uint64_t offset, int32_t bytes) {
  constexpr int kMost = 8;
#pragma unroll 1
  for (int first = 0; first < rows.count; first += kMost) {
    add_counted_rows_as_fp8<kType, 1, kMost>(sum, rows, first, rows.count - first, offset, bytes);
  }
}

}  // namespace moe_ep::one_sided
