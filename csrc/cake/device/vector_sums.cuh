// Sums of a few 512-byte vectors of a token's rows, by one warp from shared memory.
#pragma once

#include <cstdint>

#include "cake/combine_plan.h"
#include "cake/device/routing.cuh"
#include "cake/device/row_sum.cuh"
#include "cake/device/token_rows.cuh"

namespace moe_ep::cake {

// Sums of kVectors vectors of rows in shared memory. They stay in registers: what they were summed
// from may be overwritten before they are stored.
template <RowType kType, int kVectors>
struct VectorSums {
  float sum[kVectors][Chunk<kType>::kElements];

  // The vectors of the first row begin at `row`, those of the others `pitch` apart.
  __device__ void add(const uint8_t* row, int32_t rows, uint32_t pitch, bool valid) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) start(sum[v], valid);
    row += lane_id() * 16;
#pragma unroll 2
    for (int32_t j = 0; j < rows; ++j, row += pitch) {
      uint4 chunk[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        chunk[v] = *reinterpret_cast<const uint4*>(row + v * static_cast<int>(kVectorBytes));
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) Chunk<kType>::add(sum[v], chunk[v]);
    }
  }
  // scratch: 512 bytes, not looked at if the output is aligned.
  __device__ void store(uint8_t* out, int32_t bytes, bool is_aligned, uint8_t* scratch) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int byte = v * static_cast<int>(kVectorBytes);
      const uint4 chunk = Chunk<kType>::round(sum[v]);
      if (is_aligned) {
        store_aligned_vector(out + byte, bytes - byte, chunk);
      } else {
        store_unaligned_vector<kType>(out + byte, bytes - byte, chunk,
                                      reinterpret_cast<uint4*>(scratch));
      }
    }
  }
};

}  // namespace moe_ep::cake
