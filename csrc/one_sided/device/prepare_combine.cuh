// What every dispatch leaves for the combine of its round.
#pragma once

#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/rows_read.cuh"
#include "one_sided/device/workspace.cuh"

namespace moe_ep::one_sided {

// Tells combine what round it is in, and resets the counters that it takes work from. Before this
// kernel ends; nobody in this kernel reads it. Of the threads that call it, number 0 writes.
template <int kWords>
__device__ void prepare_combine(const DispatchKernelParams& p, const RankSet<kWords>& active,
                                uint32_t epoch, uint32_t thread = threadIdx.x) {
  const DeviceSegment own = own_segment(p.workspace);
  if (thread == 0) {
    DeviceState* const state = own.state();
    state->poisoned_epoch = epoch - 1;  // an old one must not match when epochs have come round
    state->num_tokens = p.num_tokens;
    state->tokens_per_rank = p.tokens_per_rank;
    RankMask mask;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      mask.words[w / 2] |= static_cast<uint64_t>(active.words[w]) << (w % 2 * 32);
    }
    state->active = mask;
    // Behind the mask: whoever waits long for this rank compares the mask where the epoch is his.
    *const_cast<volatile uint32_t*>(&state->combine_epoch) = epoch;
    state->combine_items = 0;
    state->stage_items = 0;
    state->staged_items = 0;
    if (!p.workspace.has_rank_masks) return;
    bool all_take_part = true;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int32_t ranks = min(max(p.workspace.ep_size - w * 32, 0), 32);
      all_take_part &= active.words[w] == (ranks == 32 ? ~0u : bits_below(ranks));
    }
    if (!all_take_part) leave_ranks_behind(p.workspace, epoch);
  }
}

}  // namespace moe_ep::one_sided
