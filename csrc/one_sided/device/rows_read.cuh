// What becomes of a rank that is masked off while it reads the rows of those that go on.
//
// Nobody waits for it, so its rows may be overwritten. Each rank counts what it has read; one that
// begins a round without ranks of the round before looks whether these have read all, before it can
// write its rows again, and notes the others in `left_reading`. There they find themselves: in
// check(), or when they begin another round. The count takes no look and no fence: where no mask
// loses a rank, nobody waits for it. It is only taken where there can be masks: it is a
// barrier and an atomic at the end of each CTA.
#pragma once

#include <cstdint>

#include "core/device_signal.cuh"
#include "core/epoch.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/bounded_wait.cuh"
#include "one_sided/device/workspace.cuh"

namespace moe_ep::one_sided {

// By one thread of a CTA that has the values of all peers' rows that it reads: so it cannot see a
// later store, and the count needs no release. What the CTAs of a launch add sums to
// kArrivalsPerRound, whatever their number.
__device__ inline void count_rows_read(const CombineKernelParams& p, uint32_t part) {
  atomicAdd_system(&own_segment(p.workspace).state()->rows_read, part);
}

// By all threads of every CTA of a combine that reads peers' memory, at the end.
__device__ inline void tell_rows_read(const CombineKernelParams& p) {
  if (!p.workspace.has_rank_masks) return;
  __syncthreads();
  if (threadIdx.x != 0) return;
  count_rows_read(p, blockIdx.x == 0 ? kArrivalsPerRound - (gridDim.x - 1) : 1);
}

// By one thread of a combine that reads no peer's memory, of CTA 0: before a peer can hear of the
// round's end, and so go on without this rank.
__device__ inline void tell_nothing_to_read(const CombineKernelParams& p) {
  if (!p.workspace.has_rank_masks) return;
  count_rows_read(p, kArrivalsPerRound);
}

__device__ inline bool was_left_reading(const DeviceWorkspace& workspace, int32_t peer) {
  return contains_now(DeviceSegment(workspace, peer).state()->left_reading, workspace.ep_rank);
}

// By the thread of a dispatch that has written `active`, which is not all ranks.
__device__ __noinline__ inline void leave_ranks_behind(const DeviceWorkspace& workspace,
                                                       uint32_t epoch) {
  DeviceState* const own = own_segment(workspace).state();
  uint64_t lost = 0;
#pragma unroll 1
  for (int32_t w = 0; w < rank_mask_words(workspace.ep_size); ++w) {
    lost |= own->last_active.words[w] & ~own->active.words[w];
  }
  if (lost == 0) return;
#pragma unroll 1
  for (int32_t rank = 0; rank < workspace.ep_size; ++rank) {
    const bool goes = own->last_active.contains(rank) && !own->active.contains(rank);
    if (!goes || rank == workspace.ep_rank) continue;
    const uint32_t read = poll(&DeviceSegment(workspace, rank).state()->rows_read);
    if (!epoch_reached(read, (epoch - 1) * kArrivalsPerRound)) {
      own->left_reading.insert(rank);  // seen by whoever sees a row that is written after this grid
    }
    // The other one may go on without this one, too, which has read its rows by now.
    if (!was_left_reading(workspace, rank)) continue;
    record_missed(workspace, Missed::kWentOn, Phase::kCombine, rank, epoch - 1, epoch);
  }
}

}  // namespace moe_ep::one_sided
