// Which word says that a wait has expired, and what a long wait may see of a peer.
#pragma once

#include <cstdint>

#include "one_sided/device/workspace.cuh"
#include "transport/device/bounded_wait.cuh"

namespace moe_ep::one_sided {

__device__ inline uint32_t* failed_word(const DeviceWorkspace& workspace) {
  return &own_segment(workspace).state()->failed;
}

// Of a rank whose kernels may be writing it.
__device__ inline uint64_t load_word(const RankMask& mask, int32_t word) {
  return *const_cast<const volatile uint64_t*>(&mask.words[word]);
}
__device__ inline bool contains_now(const RankMask& mask, int32_t rank) {
  return (load_word(mask, rank / kRanksPerMaskWord) >> (rank % kRanksPerMaskWord)) & 1;
}

// Whether the peer plays the round of that epoch with other ranks than this one, or has gone on
// without it: to come back takes a new beginning, so any round tells. Word by word: where a kernel
// waits, registers are dear.
__device__ inline bool has_other_mask(const DeviceWorkspace& workspace, int32_t peer,
                                      uint32_t epoch) {
  const DeviceState* const own = own_segment(workspace).state();
  const DeviceState* const theirs = DeviceSegment(workspace, peer).state();
  const uint32_t their_epoch = poll(&theirs->combine_epoch);
  if (their_epoch == 0) return false;  // it has not begun
  if (contains_now(theirs->active, peer) && !contains_now(theirs->active, workspace.ep_rank)) {
    return true;
  }
  if (poll(&own->combine_epoch) != epoch || their_epoch != epoch) return false;
#pragma unroll 1
  for (int32_t w = 0; w < rank_mask_words(workspace.ep_size); ++w) {
    if (load_word(own->active, w) != load_word(theirs->active, w)) return true;
  }
  return false;
}

// For the host.
__device__ inline void tell_mask(const DeviceWorkspace& workspace, int32_t rank) {
#pragma unroll 1
  for (int32_t w = 0; w < rank_mask_words(workspace.ep_size); ++w) {
    workspace.page->masks[rank].words[w] =
        load_word(DeviceSegment(workspace, rank).state()->active, w);
  }
}

// What the host gets to know of a peer that was missed, besides its name.
__device__ inline void tell_more(const DeviceWorkspace& workspace, Missed why, int32_t peer) {
  if (why != Missed::kMasksDiffer) return;
  tell_mask(workspace, workspace.ep_rank);
  tell_mask(workspace, peer);
}

__device__ inline Missed obstacle_of(const DeviceWorkspace& workspace, int32_t peer,
                                     uint32_t epoch) {
  if (has_other_mask(workspace, peer, epoch)) return Missed::kMasksDiffer;
  const uint32_t* const has_left = &DeviceSegment(workspace, peer).control()->has_left;
  if (poll(has_left) != 0) return Missed::kDestroyed;
  const uint32_t* const failed = &DeviceSegment(workspace, peer).state()->failed;
  return poll(failed) != 0 ? Missed::kPeerGaveUp : Missed::kDeadline;
}

}  // namespace moe_ep::one_sided
