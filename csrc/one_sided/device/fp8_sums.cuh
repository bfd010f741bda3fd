// Rows of scaled FP8 (core/scaled_fp8.h): how their source waits for them and sums them. The bits
// are those of one_sided/fp8_rows.cpp.
#pragma once

#include <cstdint>

#include "core/scaled_fp8.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/bounded_wait.cuh"
#include "one_sided/device/e4m3.cuh"
#include "one_sided/device/fp8_round.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/token_rows.cuh"
#include "transport/device/memory_access.cuh"
#include "transport/device/row_sum.cuh"

namespace moe_ep::one_sided {

using Fp8Sums = float[kFp8Vectors][kFp8Elements];

// Where this lane reads in every row; in units of what it reads, which 32 bits hold.
struct Fp8Place {
  uint32_t codes[kFp8Vectors];
  uint32_t scale;  // of block lane % kFp8PieceBlocks of the piece, for row lane / kFp8PieceBlocks

  __device__ Fp8Place(const Fp8Row& row, uint32_t piece) {
    const auto lane = static_cast<uint32_t>(lane_id());
    // Lanes behind the end of the row read its last bytes.
    const auto last = static_cast<uint32_t>(row.pitch / sizeof(uint2)) - 1;
#pragma unroll
    for (uint32_t v = 0; v < kFp8Vectors; ++v) {
      codes[v] = min((piece * kFp8Vectors + v) * kWarpSize + lane, last);
    }
    const uint32_t block = piece * kFp8PieceBlocks + lane % kFp8PieceBlocks;
    scale = static_cast<uint32_t>(static_cast<uint64_t>(row.scales_offset) / sizeof(float)) +
            min(block, static_cast<uint32_t>(row.num_blocks) - 1);
  }
};

__device__ inline uint2 load_codes(const uint2* from) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1},[%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(from)
               : "memory");
  return v;
}

__device__ inline float load_scale(const float* from) {
  float scale;
  asm volatile("ld.global.L1::no_allocate.f32 %0,[%1];" : "=f"(scale) : "l"(from) : "memory");
  return scale;
}

// Products of an element and a scale are exact: fused or not, the sum is the same.
__device__ inline void add_codes(float (&sum)[kFp8Elements], uint2 codes, float scale) {
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    float number[4];
    unpack_e4m3(w == 0 ? codes.x : codes.y, number);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[4 * w + i] = __fmaf_rn(number[i], scale, sum[4 * w + i]);
  }
}

// Adds the piece of kRows rows from row `first` on, with all loads in flight at once.
template <int kRows>
__device__ void add_some_fp8_rows(Fp8Sums& sum, const TokenRows& rows, int first,
                                  const Fp8Place& place) {
  const auto row_of = [&](int k) {
    const auto bits = reinterpret_cast<unsigned long long>(rows.row);
    return reinterpret_cast<const uint8_t*>(__shfl_sync(kAllLanes, bits, first + k));
  };
  const int my_row = lane_id() / kFp8PieceBlocks;
  const uint8_t* const row = row_of(my_row);
  float scales = 0.0f;
  if (my_row < kRows) scales = load_scale(reinterpret_cast<const float*>(row) + place.scale);
  uint2 codes[kRows][kFp8Vectors];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const auto* const from = reinterpret_cast<const uint2*>(row_of(k));
#pragma unroll
    for (int v = 0; v < kFp8Vectors; ++v) codes[k][v] = load_codes(from + place.codes[v]);
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
#pragma unroll
    for (int v = 0; v < kFp8Vectors; ++v) {
      constexpr int kBlocks = kFp8PieceBlocks / kFp8Vectors;
      const int block = v * kBlocks + lane_id() / (kWarpSize / kBlocks);
      add_codes(sum[v], codes[k][v], __shfl_sync(kAllLanes, scales, k * kFp8PieceBlocks + block));
    }
  }
}

// The same for `count` rows, kFewest to kMost of them, or kMost if they are more; see
// add_counted_rows.
template <int kFewest, int kMost>
__device__ void add_counted_fp8_rows(Fp8Sums& sum, const TokenRows& rows, int first, int count,
                                     const Fp8Place& place) {
  if constexpr (kFewest == kMost) {
    add_some_fp8_rows<kMost>(sum, rows, first, place);
  } else {
    constexpr int kMiddle = (kFewest + kMost) / 2;
    if (count <= kMiddle) {
      add_counted_fp8_rows<kFewest, kMiddle>(sum, rows, first, count, place);
    } else {
      add_counted_fp8_rows<kMiddle + 1, kMost>(sum, rows, first, count, place);
    }
  }
}

__device__ inline void add_fp8_rows(Fp8Sums& sum, const TokenRows& rows, const Fp8Place& place) {
#pragma unroll 1
  for (int first = 0; first < rows.count; first += kMaxFp8RowsAtOnce) {
    add_counted_fp8_rows<1, kMaxFp8RowsAtOnce>(sum, rows, first, rows.count - first, place);
  }
}

// By one warp; lane j: for a part of the token's row j, of rows that are pushed here. False: the
// wait has expired.
__device__ inline bool await_part(const Fp8Combine& c, uint32_t epoch, const SendSlot& slot,
                                  int count, uint32_t part) {
  const CombineKernelParams& p = c.combine;
  const int64_t row = static_cast<int64_t>(slot.rank) * p.tokens_per_rank + slot.row;
  const uint32_t* const flag = own_segment(p.workspace).row_flags(row) + part;
  bool is_late = lane_id() < count;
  Patience patience;
  for (;;) {
    if (is_late) is_late = poll(flag) != epoch;
    if (!__any_sync(kAllLanes, is_late)) break;
    // What the flag says now is of some earlier round that had so many rows.
    const bool gives_up =
        is_late && patience.counts_to_look() &&
        patience.has_run_out(p.workspace, Phase::kCombine, slot.rank, epoch, epoch - 1);
    if (__any_sync(kAllLanes, gives_up)) return false;
  }
  __syncwarp();  // what one lane has waited for, all read
  return true;
}

}  // namespace moe_ep::one_sided
