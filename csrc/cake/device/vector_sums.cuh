// Sums of a few 512-byte vectors of a token's rows, by one warp from shared memory.
#pragma once

#include <cstdint>

#include "cake/namespace.h"
#include "one_sided/combine_plan.h"
#include "one_sided/device/fp8_sum.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/token_rows.cuh"
#include "transport/device/memory_access.cuh"
#include "transport/device/row_sum.cuh"

namespace moe_ep::cake {

// Sums of kVectors vectors of rows in shared memory, the last of which may be cut short. They stay
// in registers: what they were summed from may be overwritten before they are stored.
template <RowType kType, int kVectors, bool kAsFp8>
class VectorSums {
 public:
  // The vectors of the first row begin at `row`, those of the others `pitch` apart. Each row is
  // loaded before the one in front of it is added, so that no addition waits for shared memory.
  __device__ VectorSums(const uint8_t* row, int32_t rows, uint32_t pitch, uint32_t bytes)
      : left_(static_cast<int32_t>(bytes - lane_byte() - byte_of(kVectors - 1))) {
    row += lane_byte();
    uint4 first[kVectors];
    uint4 ahead[kVectors];
    for_each([&](int v) { first[v] = load(row, v); });
    row += rows > 1 ? pitch : 0;
    for_each([&](int v) { ahead[v] = load(row, v); });
    __syncwarp();  // or the assembler moves the loads behind the first additions
    if constexpr (kAsFp8) {
      for_each([&](int v) { start(sum_[v], true); });
      add(first);
    } else {
      for_each([&](int v) { Chunk<kType>::begin(sum_[v], first[v]); });
    }
    if (rows == 1) return;
#pragma unroll 1
    for (int32_t j = 2; j < rows; ++j) {
      row += pitch;
      if constexpr (kAsFp8) {
        add(ahead);
        for_each([&](int v) { ahead[v] = load(row, v); });
      } else {
        for_each([&](int v) {
          Chunk<kType>::add(sum_[v], ahead[v]);
          ahead[v] = load(row, v);
        });
      }
    }
    add(ahead);
  }
  // The first `bytes` of them.
  __device__ void store(uint8_t* out, uint32_t bytes) const {
    uint8_t* const to = out + lane_byte();
#pragma unroll
    for (int v = 0; v < kVectors - 1; ++v) store_chunk(to + byte_of(v), rounded(v));
    constexpr uint32_t kLast = byte_of(kVectors - 1);
    if (lane_byte() + kLast < bytes) store_chunk(to + kLast, rounded(kVectors - 1));
  }
  // Where the output is not aligned; scratch has room for all of them.
  __device__ void store_unaligned(uint8_t* out, uint32_t bytes, uint8_t* scratch) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      *reinterpret_cast<uint4*>(scratch + byte_of(v) + lane_byte()) = rounded(v);
    }
    __syncwarp();
    store_elements<kType>(out, scratch, static_cast<int32_t>(bytes));
  }

 private:
  __device__ void add(uint4 (&chunk)[kVectors]) {
    if constexpr (kAsFp8) {
      chunk[kVectors - 1] = cut_chunk(chunk[kVectors - 1], left_);
      add_as_fp8<kType>(chunk,
                        [&](int v) -> float (&)[Chunk<kType>::kElements] { return sum_[v]; });
    } else {
      for_each([&](int v) { Chunk<kType>::add(sum_[v], chunk[v]); });
    }
  }
  __device__ static constexpr uint32_t byte_of(int vector) {
    return static_cast<uint32_t>(vector) * kVectorBytes;
  }
  __device__ static uint32_t lane_byte() { return static_cast<uint32_t>(lane_id()) * 16; }
  __device__ uint4 rounded(int vector) const { return Chunk<kType>::round(sum_[vector]); }
  __device__ static uint4 load(const uint8_t* row, int vector) {
    return *reinterpret_cast<const uint4*>(row + byte_of(vector));
  }
  template <typename Visit>
  __device__ static void for_each(const Visit& visit) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) visit(v);
  }

  float sum_[kVectors][Chunk<kType>::kElements];
  int32_t left_;  // of a row, from this lane's last chunk on
};

}  // namespace moe_ep::cake
