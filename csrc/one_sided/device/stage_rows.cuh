// Brings the expert outputs into the workspace, where the sources read them, and tells the sources
// when all are there.
//
// Not each source when its own block is: the outputs may lie where a source sends its next rows (an
// expert that works in place), or where this rank's own sums go.
//
// Items are taken from a counter by warps, so that any running CTA can do all of them: sources wait
// for them, and the CTAs of a grid need not run together. Rows without a token are never read.
#pragma once

#include <cstdint>

#include "core/device_signal.cuh"
#include "core/limits.h"
#include "one_sided/combine_plan.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::one_sided {

// Of one CTA, in shared memory: items [first_item[s], first_item[s + 1]) are those of source s.
struct StageTable {
  uint32_t first_item[kMaxEpSize + 1];
};

// By all threads of a CTA. num_rows(source): rows of that source's block to bring, or -1 if it
// takes no part.
template <typename NumRows>
__device__ void fill_stage_table(const CombineKernelParams& p, const StagePlan& plan,
                                 NumRows num_rows, StageTable& table) {
  if (threadIdx.x < kWarpSize) {
    const int lane = lane_id();
    uint32_t before = 0;
    if (lane == 0) table.first_item[0] = 0;
    for (int32_t first = 0; first < p.workspace.ep_size; first += kWarpSize) {
      const int32_t source = first + lane;
      const int64_t rows = source < p.workspace.ep_size ? num_rows(source) : -1;
      const uint64_t chunks = static_cast<uint64_t>(max(rows, int64_t{0}) * plan.chunks_per_row);
      uint32_t items = rows < 0      ? 0
                       : chunks == 0 ? 1
                                     : static_cast<uint32_t>((chunks - 1) >> plan.item_shift) + 1;
#pragma unroll
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const uint32_t below = __shfl_up_sync(kAllLanes, items, distance);
        if (lane >= distance) items += below;
      }
      if (source < p.workspace.ep_size) table.first_item[source + 1] = before + items;
      before += __shfl_sync(kAllLanes, items, kWarpSize - 1);
    }
  }
  __syncthreads();
}

__device__ inline int32_t source_of_item(const CombineKernelParams& p, const StageTable& table,
                                         uint32_t item) {
  int32_t source = 0;
  for (int32_t first = 0; first < p.workspace.ep_size; first += kWarpSize) {
    const int32_t s = first + lane_id();
    const bool behind = s < p.workspace.ep_size && table.first_item[s + 1] <= item;
    source += __popc(__ballot_sync(kAllLanes, behind));
  }
  return source;
}

// Copies one warp's item: chunks [first, first + count) of the block of `source`.
template <bool kAligned>
__device__ void copy_some_chunks(const CombineKernelParams& p, const StagePlan& plan,
                                 int32_t source, uint64_t first, uint32_t count) {
  constexpr int kInFlight = kAligned ? 8 : 2;  // loads of a lane
  const auto chunks_per_row = static_cast<uint32_t>(plan.chunks_per_row);
  const int64_t block = static_cast<int64_t>(source) * p.tokens_per_rank;
  const uint64_t first_row = first / chunks_per_row;
  const auto skipped = static_cast<uint32_t>(first - first_row * chunks_per_row);
  const uint8_t* const from =
      p.expert_output + (block + static_cast<int64_t>(first_row)) * p.expert_output_stride;
  uint8_t* const to = own_segment(p.workspace).combine_row(block, p.pitch) + first * kRowAlignment;
  for (uint32_t begin = static_cast<uint32_t>(lane_id()); begin < count;
       begin += kInFlight * kWarpSize) {
    uint4 chunk[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const uint32_t i = begin + static_cast<uint32_t>(k * kWarpSize);
      if (i >= count) continue;
      const auto place = static_cast<int32_t>(skipped + i);
      const int32_t row = plan.by_row.divide(place);
      const int64_t byte =
          static_cast<int64_t>(place - row * plan.chunks_per_row) * int64_t{kRowAlignment};
      const uint8_t* const at = from + row * p.expert_output_stride + byte;
      if constexpr (kAligned) {
        chunk[k] = load_chunk(at);
      } else {
        chunk[k] = load_unaligned(at, static_cast<int32_t>(min(p.row_bytes - byte, int64_t{16})));
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const uint32_t i = begin + static_cast<uint32_t>(k * kWarpSize);
      if (i < count) store_chunk(to + static_cast<uint64_t>(i) * kRowAlignment, chunk[k]);
    }
  }
}

__device__ inline void copy_chunks(const CombineKernelParams& p, const StagePlan& plan,
                                   int32_t source, uint64_t first, uint32_t count) {
  if (p.expert_output_is_aligned) {
    copy_some_chunks<true>(p, plan, source, first, count);
  } else {
    copy_some_chunks<false>(p, plan, source, first, count);
  }
}

// By all threads of every CTA; returns when no item is left to take. publish() is called by one
// warp of the grid, once all items are done.
template <typename NumRows, typename Publish>
__device__ void stage_rows(const CombineKernelParams& p, const StagePlan& plan, NumRows num_rows,
                           Publish publish, StageTable& table) {
  const DeviceSegment own = own_segment(p.workspace);
  const int lane = lane_id();
  // An addition would be awaited at once, see ItemCounter.
  const auto take = [&] {
    return lane == 0 ? atomicInc(&own.state()->stage_items, 0xFFFFFFFEu) : 0u;
  };
  uint32_t taken = take();  // in flight while the table is made
  fill_stage_table(p, plan, num_rows, table);
  const uint32_t total = table.first_item[p.workspace.ep_size];
  // With few items a warp takes one when it is free; with many it takes the next one early.
  const bool early = total > gridDim.x * blockDim.x / kWarpSize;
  for (;;) {
    const uint32_t item = __shfl_sync(kAllLanes, taken, 0);
    if (item >= total) break;
    if (early) taken = take();
    const int32_t source = source_of_item(p, table, item);
    const uint32_t first_item = table.first_item[source];
    const uint64_t first = static_cast<uint64_t>(item - first_item) << plan.item_shift;
    const uint64_t chunks =
        static_cast<uint64_t>(max(num_rows(source), int64_t{0}) * plan.chunks_per_row);
    copy_chunks(p, plan, source, first,
                static_cast<uint32_t>(min(chunks - first, uint64_t{1} << plan.item_shift)));
    __syncwarp();  // lane 0 speaks for what the other lanes wrote
    uint32_t done = 0;
    if (lane == 0) done = signal_and_count(&own.state()->staged_items, 1) + 1;
    done = __shfl_sync(kAllLanes, done, 0);
    if (done == total) {
      __syncwarp();  // and hears for them what others wrote
      publish();
    }
    if (!early) taken = take();
  }
}

}  // namespace moe_ep::one_sided
