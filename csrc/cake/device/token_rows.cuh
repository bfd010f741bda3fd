// The rows of a token: where they lie on the owners' ranks, and how they are pulled and summed.
#pragma once

#include <cstdint>

#include "cake/cuda_params.h"
#include "cake/device/memory_access.cuh"
#include "cake/device/routing.cuh"
#include "cake/device/row_sum.cuh"
#include "cake/device/workspace.cuh"

namespace moe_ep::cake {

// Lane j has the slot of the token's row j. Written by dispatch, so it can be read before the wait.
__device__ inline SendSlot load_slot(const CombineKernelParams& p, int32_t token) {
  if (lane_id() >= p.workspace.max_destinations) return {-1, 0};
  static_assert(sizeof(SendSlot) == sizeof(int2));
  const auto* slots = reinterpret_cast<const int2*>(own_segment(p.workspace).send_slots(token));
  const int2 slot = slots[lane_id()];
  return {slot.x, slot.y};
}

struct TokenRows {
  const uint8_t* row;  // of lane j < count: row j, in ascending order of the ranks
  int count;           // the same for all lanes
};

// valid: whether the sum may be formed; if not, no row is looked at.
__device__ inline TokenRows locate_rows(const CombineKernelParams& p, SendSlot slot, bool valid) {
  const uint32_t behind_end = __ballot_sync(kAllLanes, slot.rank < 0 || !valid);
  TokenRows rows{nullptr, behind_end == 0 ? kWarpSize : __ffs(static_cast<int>(behind_end)) - 1};
  if (lane_id() < rows.count) {
    const int64_t block = static_cast<int64_t>(p.workspace.ep_rank) * p.tokens_per_rank;
    rows.row = DeviceSegment(p.workspace, slot.rank).combine_row(block + slot.row, p.pitch);
  }
  return rows;
}

// Adds the 16 bytes at `offset` of each of the token's rows. Up to eight loads of a lane are in
// flight; one's own row is loaded like the others, since a case of its own would make them wait
// for each other.
template <RowType kType>
__device__ void add_rows(float (&sum)[Chunk<kType>::kElements], const TokenRows& rows,
                         uint64_t offset) {
  constexpr int kInFlight = 8;
  for (int first = 0; first < rows.count; first += kInFlight) {
    uint4 chunk[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (first + k < rows.count) {
        const auto row =
            __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(rows.row), first + k);
        chunk[k] = load_chunk(reinterpret_cast<const uint8_t*>(row) + offset);
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (first + k < rows.count) Chunk<kType>::add(sum, chunk[k]);
    }
  }
}

// Stores a warp's 512 bytes, or the first `bytes` of them, 16 bytes a lane. If the destination is
// not aligned they go through shared memory, so that neighbouring lanes write neighbouring
// elements.
template <RowType kType>
__device__ void store_vector(uint8_t* to, int64_t bytes, uint4 chunk, bool is_aligned,
                             uint4* scratch) {
  const int lane = lane_id();
  if (is_aligned) {
    if (lane * 16 < bytes) store_chunk(to + lane * 16, chunk);
    return;
  }
  using Element = typename Chunk<kType>::Element;
  constexpr int kElements = kWarpSize * Chunk<kType>::kElements;
  scratch[lane] = chunk;
  __syncwarp();
#pragma unroll 1  // unrolled, its addresses cost the aligned case 40 registers
  for (int i = lane; i < kElements; i += kWarpSize) {
    if (i * static_cast<int64_t>(sizeof(Element)) < bytes) {
      reinterpret_cast<Element*>(to)[i] = reinterpret_cast<const Element*>(scratch)[i];
    }
  }
  __syncwarp();  // read before it is written again
}

}  // namespace moe_ep::cake
