// The rows of a token: where they lie on the owners' ranks, and how they are pulled and summed.
#pragma once

#include <cstdint>

#include "cake/cuda_params.h"
#include "cake/device/memory_access.cuh"
#include "cake/device/routing.cuh"
#include "cake/device/row_sum.cuh"
#include "cake/device/workspace.cuh"

namespace moe_ep::cake {

// Where lane j finds the slot of the token's row j.
__device__ inline const int2* slot_address(const CombineKernelParams& p, int32_t token) {
  static_assert(sizeof(SendSlot) == sizeof(int2));
  return reinterpret_cast<const int2*>(own_segment(p.workspace).send_slots(token)) + lane_id();
}

// Written by dispatch, so it can be read before the wait.
__device__ inline SendSlot load_slot(const CombineKernelParams& p, const int2* address) {
  if (lane_id() >= p.workspace.max_destinations) return {-1, 0};
  const int2 slot = *address;
  return {slot.x, slot.y};
}

struct TokenRows {
  const uint8_t* row;  // of lane j < count: row j, in ascending order of the ranks
  int count;           // the same for all lanes
};

// Nothing is read from the rows: this may come before the wait.
__device__ inline TokenRows locate_rows(const CombineKernelParams& p, SendSlot slot) {
  const uint32_t behind_end = __ballot_sync(kAllLanes, slot.rank < 0);
  TokenRows rows{nullptr, behind_end == 0 ? kWarpSize : __ffs(static_cast<int>(behind_end)) - 1};
  if (lane_id() < rows.count) {
    const int64_t block = static_cast<int64_t>(p.workspace.ep_rank) * p.tokens_per_rank;
    rows.row = DeviceSegment(p.workspace, slot.rank).combine_row(block + slot.row, p.pitch);
  }
  return rows;
}

// Adds the 16 bytes at `offset` of kRows rows from row `first` on, with all loads in flight at
// once. One's own row is loaded like the others, since a case of its own would make them wait for
// each other.
template <RowType kType, int kRows>
__device__ void add_some_rows(float (&sum)[Chunk<kType>::kElements], const TokenRows& rows,
                              int first, uint64_t offset) {
  uint4 chunk[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const auto row =
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(rows.row), first + k);
    chunk[k] = load_chunk(reinterpret_cast<const uint8_t*>(row) + offset);
  }
#pragma unroll
  for (int k = 0; k < kRows; ++k) Chunk<kType>::add(sum, chunk[k]);
}

// The same for `count` rows, kFewest to kMost of them, or kMost if they are more. Code of its own
// for each number: to ask for each row whether it is there takes twice the instructions, and
// registers, which are warps in flight. Found by halves, since a jump through a table waits for the
// table.
template <RowType kType, int kFewest, int kMost>
__device__ void add_counted_rows(float (&sum)[Chunk<kType>::kElements], const TokenRows& rows,
                                 int first, int count, uint64_t offset) {
  if constexpr (kFewest == kMost) {
    add_some_rows<kType, kMost>(sum, rows, first, offset);
  } else {
    constexpr int kMiddle = (kFewest + kMost) / 2;
    if (count <= kMiddle) {
      add_counted_rows<kType, kFewest, kMiddle>(sum, rows, first, count, offset);
    } else {
      add_counted_rows<kType, kMiddle + 1, kMost>(sum, rows, first, count, offset);
    }
  }
}

// Adds the 16 bytes at `offset` of each of the token's rows, up to eight at once.
template <RowType kType>
__device__ void add_rows(float (&sum)[Chunk<kType>::kElements], const TokenRows& rows,
                         uint64_t offset) {
  constexpr int kMost = 8;
#pragma unroll 1
  for (int first = 0; first < rows.count; first += kMost) {
    add_counted_rows<kType, 1, kMost>(sum, rows, first, rows.count - first, offset);
  }
}

// Stores a warp's 512 bytes, or the first `bytes` of them, 16 bytes a lane.
__device__ inline void store_aligned_vector(uint8_t* to, int32_t bytes, uint4 chunk) {
  if (lane_id() * 16 < bytes) store_chunk(to + lane_id() * 16, chunk);
}

// The same where the destination is not aligned: through shared memory, so that neighbouring lanes
// write neighbouring elements.
template <RowType kType>
__device__ void store_unaligned_vector(uint8_t* to, int32_t bytes, uint4 chunk, uint4* scratch) {
  using Element = typename Chunk<kType>::Element;
  constexpr int kElements = kWarpSize * Chunk<kType>::kElements;
  scratch[lane_id()] = chunk;
  __syncwarp();
#pragma unroll 1  // unrolled, its addresses cost the aligned case 40 registers
  for (int i = lane_id(); i < kElements; i += kWarpSize) {
    if (i * static_cast<int>(sizeof(Element)) < bytes) {
      reinterpret_cast<Element*>(to)[i] = reinterpret_cast<const Element*>(scratch)[i];
    }
  }
  __syncwarp();  // read before it is written again
}

}  // namespace moe_ep::cake
