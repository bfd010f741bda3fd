// Sums of a part of a token's rows, by one warp.
#pragma once

#include <cstdint>

#include "transport/device/memory_access.cuh"
#include "transport/device/row_sum.cuh"
#include "transport/device/unaligned.cuh"
#include "transport/device/warp.cuh"
#include "two_sided/cuda_params.h"

namespace moe_ep::two_sided {

// Where the sum goes, and how much of it is here.
struct PartOfSum {
  uint8_t* out;
  int64_t bytes;  // of the part; the last chunk may be cut short
  int32_t chunks;
  bool is_whole;

  __device__ PartOfSum(const CombineKernelParams& p, const Item& item, int32_t token) {
    const int64_t row_bytes = p.expert_rows.row_bytes;
    const int64_t begin = int64_t{16} * item.begin;
    out = p.output + token * row_bytes + begin;
    bytes = min(item.bytes(), row_bytes - begin);
    chunks = item.chunks;
    is_whole = p.output_is_whole;
  }
  __device__ int32_t bytes_of(int32_t chunk) const {
    return static_cast<int32_t>(min(bytes - int64_t{16} * chunk, int64_t{16}));
  }
  __device__ void store(int32_t chunk, uint4 sum) const {
    if (chunk >= chunks) return;
    if (is_whole) {
      store_chunk(out + int64_t{16} * chunk, sum);
    } else {
      store_unaligned(out + int64_t{16} * chunk, sum, bytes_of(chunk));
    }
  }
};

// Chunks of a part that a lane sums at the same time, each in float32.
template <RowType kType, int kVectors>
struct LaneSums {
  float sums[kVectors][Chunk<kType>::kElements];
  int32_t first;  // the lane's first chunk; the others follow kWarpSize apart

  __device__ explicit LaneSums(int32_t begin, bool valid) : first(begin + lane_id()) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) start(sums[v], valid);
  }
  // Adds kRows rows, with all loads in flight at once. Behind the end of the part the last chunk is
  // loaded again.
  template <int kRows, bool kWhole>
  __device__ void add(const PartOfSum& part, uint8_t* const* rows) {
    uint4 chunks[kRows][kVectors];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int32_t chunk = min(first + v * kWarpSize, part.chunks - 1);
        const uint8_t* const from = rows[r] + int64_t{16} * chunk;
        chunks[r][v] = kWhole ? load_chunk(from) : load_unaligned(from, part.bytes_of(chunk));
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) Chunk<kType>::add(sums[v], chunks[r][v]);
    }
  }
  __device__ void store(const PartOfSum& part) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      part.store(first + v * kWarpSize, Chunk<kType>::round(sums[v]));
    }
  }
};

// kWhole: all rows start on 16 bytes and are of whole chunks. (Those in slots are padded.)
template <RowType kType, bool kWhole>
__device__ void sum_part(const PartOfSum& part, uint8_t* const* rows, int32_t count) {
  constexpr int kMost = 4;                  // rows at once
  constexpr int kVectors = kWhole ? 3 : 1;  // for the registers
  constexpr int32_t kStep = kVectors * kWarpSize;
#pragma unroll 1
  for (int32_t begin = 0; begin < part.chunks; begin += kStep) {
    LaneSums<kType, kVectors> lane(begin, true);
    int32_t row = 0;
#pragma unroll 1
    for (; row + kMost <= count; row += kMost) lane.template add<kMost, kWhole>(part, rows + row);
    switch (count - row) {
      case 3:
        lane.template add<3, kWhole>(part, rows + row);
        break;
      case 2:
        lane.template add<2, kWhole>(part, rows + row);
        break;
      case 1:
        lane.template add<1, kWhole>(part, rows + row);
        break;
      default:
        break;
    }
    lane.store(part);
  }
}

// NaN in its place.
template <RowType kType>
__device__ void poison_part(const PartOfSum& part) {
  for (int32_t begin = 0; begin < part.chunks; begin += kWarpSize) {
    LaneSums<kType, 1>(begin, false).store(part);
  }
}

}  // namespace moe_ep::two_sided
