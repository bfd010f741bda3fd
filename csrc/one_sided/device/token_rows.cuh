// The rows of a token: where they lie on the owners' ranks, and how they are pulled and summed.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"
#include "transport/device/row_sum.cuh"

namespace moe_ep::one_sided {

// Where lane j finds the slot of a token's row j.
__device__ inline const int2* lane_slot(const SendSlot* slots_of_token) {
  static_assert(sizeof(SendSlot) == sizeof(int2));
  return reinterpret_cast<const int2*>(slots_of_token) + lane_id();
}
__device__ inline const int2* slot_address(const CombineKernelParams& p, int32_t token) {
  return lane_slot(own_segment(p.workspace).send_slots(token));
}

// Written by dispatch, so it can be read before the wait.
__device__ inline SendSlot load_slot(const CombineKernelParams& p, const int2* address) {
  if (lane_id() >= p.workspace.max_destinations) return {-1, 0};
  const int2 slot = *address;
  return {slot.x, slot.y};
}

// A bit for each lane j that has the slot of a row j; for all lanes.
__device__ inline uint32_t lanes_with_row(SendSlot slot) {
  const uint32_t behind_end = __ballot_sync(kAllLanes, slot.rank < 0);
  return ~behind_end & (behind_end - 1);  // those below the first that has none: all, if all have
}

struct TokenRows {
  const uint8_t* row;  // of lane j < count: row j, in ascending order of the ranks
  int count;           // the same for all lanes
};

// A block of rows from each rank: in that rank's segment, or, of rows that were pushed, here.
struct RowBlocks {
  const uint8_t* first;  // that of rank 0
  uint64_t rank_stride;
  uint64_t pitch;  // of the rows

  MOE_EP_HOST_DEVICE explicit RowBlocks(const CombineKernelParams& p)
      : first(DeviceSegment(p.workspace, 0)
                  .combine_row(static_cast<int64_t>(p.workspace.ep_rank) * p.tokens_per_rank,
                               p.pitch)),
        rank_stride(static_cast<uint64_t>(p.workspace.rank_stride)),
        pitch(p.pitch) {}
  static RowBlocks pushed(const CombineKernelParams& p) {
    RowBlocks blocks(p);
    blocks.first = own_segment(p.workspace).combine_row(0, p.pitch);
    blocks.rank_stride = static_cast<uint64_t>(p.tokens_per_rank) * p.pitch;
    return blocks;
  }

  // Where a slot's row lies, if there is one.
  __device__ const uint8_t* row(SendSlot slot) const {
    return first + static_cast<uint32_t>(slot.rank) * rank_stride +
           static_cast<uint32_t>(slot.row) * pitch;
  }
};

// Nothing is read from the rows: this may come before the wait.
__device__ inline TokenRows locate_rows(const RowBlocks& blocks, SendSlot slot) {
  const uint32_t lanes = lanes_with_row(slot);
  return {blocks.row(slot), __popc(lanes)};
}
__device__ inline TokenRows locate_rows(const CombineKernelParams& p, SendSlot slot) {
  return locate_rows(RowBlocks(p), slot);
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

// Stores `bytes` from shared memory where the destination is not aligned: neighbouring lanes write
// neighbouring elements.
template <RowType kType>
__device__ void store_elements(uint8_t* to, const void* from, int32_t bytes) {
  using Element = typename Chunk<kType>::Element;
#pragma unroll 1  // unrolled, its addresses cost the aligned case 40 registers
  for (int i = lane_id(); i * static_cast<int>(sizeof(Element)) < bytes; i += kWarpSize) {
    reinterpret_cast<Element*>(to)[i] = static_cast<const Element*>(from)[i];
  }
}

// As store_aligned_vector, through 512 bytes of shared memory.
template <RowType kType>
__device__ void store_unaligned_vector(uint8_t* to, int32_t bytes, uint4 chunk, uint4* scratch) {
  scratch[lane_id()] = chunk;
  __syncwarp();
  store_elements<kType>(to, scratch, bytes);
  __syncwarp();  // read before it is written again
}

// Whichever of the two is right.
template <RowType kType>
__device__ void store_rounded(uint8_t* to, int32_t bytes, bool is_aligned, uint4 chunk,
                              uint4* scratch) {
  if (is_aligned) {
    store_aligned_vector(to, bytes, chunk);
  } else {
    store_unaligned_vector<kType>(to, bytes, chunk, scratch);
  }
}

}  // namespace moe_ep::one_sided
