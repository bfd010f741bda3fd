// How every combine kernel begins: the expert rows of this rank are published, those of the others
// awaited.
//
// A flag {epoch, signature} goes from each owner p to each active source s, into slot p of s, when
// the rows of block s are complete at p: by CTA 0 at once if the experts wrote them in place, else
// by whoever stages the last of them. Each CTA waits for the flags of all active ranks, also those
// that it has no rows from: their flag says that what they received in this round is consumed, so
// that the next dispatch may write it. A flag is written again in the next combine, which comes
// after the source's next dispatch, so it cannot be ahead.
#pragma once

#include <cstdint>

#include "cake/combine_plan.h"
#include "cake/cuda_params.h"
#include "cake/device/bounded_wait.cuh"
#include "cake/device/memory_access.cuh"
#include "cake/device/stage_rows.cuh"
#include "cake/device/workspace.cuh"
#include "core/device_signal.cuh"
#include "core/epoch.h"

namespace moe_ep::cake {

struct CombineRound {
  uint32_t epoch;
  bool failed;    // a wait has expired before: nothing may be waited for any more
  bool poisoned;  // the ranks disagreed in dispatch: sums are NaN
  bool misused;   // not called with the sizes of the dispatch
};

// By all threads of a CTA, after wait_for_previous_kernel; the same for all of them.
__device__ inline CombineRound read_round(const CombineKernelParams& p) {
  const DeviceState* const state = own_segment(p.workspace).state();
  CombineRound round{};
  round.epoch = state->combine_epoch;
  round.poisoned = state->poisoned_epoch == round.epoch;
  round.misused = state->num_tokens != p.num_tokens || state->tokens_per_rank != p.tokens_per_rank;
  // Another CTA may fail at this moment.
  round.failed = __syncthreads_or(has_failed(p.workspace)) != 0;
  return round;
}

// In the round in flight, as dispatch has found it.
__device__ inline bool is_active(const CombineKernelParams& p, int32_t rank) {
  return own_segment(p.workspace).state()->active.contains(rank);
}

// A rank that is misused has no rows to offer, and says so by a signature that matches nobody's.
__device__ inline void publish_rows(const CombineKernelParams& p, const CombineRound& round,
                                    int32_t source) {
  signal_store(DeviceSegment(p.workspace, source).combine_flag(p.workspace.ep_rank), round.epoch,
               round.misused ? ~p.signature : p.signature);
}

__device__ inline void record_combine_disagreement(const DeviceWorkspace& workspace) {
  DisagreementRecord* const record = &workspace.page->disagreement;
  if (*const_cast<volatile uint32_t*>(&record->recorded) != 0) return;
  record->phase = Phase::kCombine;
  __threadfence_system();  // the host sees `recorded` last
  *const_cast<volatile uint32_t*>(&record->recorded) = 1;
}

// False: the owner was called with something else, or the wait has expired; the host is told.
__device__ inline bool await_rows(const CombineKernelParams& p, const CombineRound& round,
                                  int32_t owner) {
  const CombineFlag* const flag = own_segment(p.workspace).combine_flag(owner);
  Patience patience;
  for (;;) {
    const Pair seen = poll_pair(flag);
    if (epoch_reached(seen.low, round.epoch)) {
      if (seen.low != round.epoch || seen.high == p.signature) return true;
      if (blockIdx.x == 0) record_combine_disagreement(p.workspace);
      return false;
    }
    if (patience.exhausted(p.workspace, Phase::kCombine, owner, round.epoch, seen.low)) {
      return false;
    }
  }
}

// By all threads of every CTA, unless the round has failed. Returns, the same for all threads of a
// CTA, whether its sums may be formed: if not they are NaN. After this a kernel waits for nobody.
__device__ inline bool exchange_rows(const CombineKernelParams& p, const StagePlan& plan,
                                     const CombineRound& round, StageTable& table) {
  const int32_t ep_size = p.workspace.ep_size;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const auto threads = static_cast<int32_t>(blockDim.x);
  if (p.expert_output != nullptr) {
    const int32_t* const recv_counts = own_segment(p.workspace).recv_counts();
    const auto num_rows = [&](int32_t source) -> int64_t {
      if (!is_active(p, source)) return -1;
      return round.misused ? 0 : recv_counts[source];
    };
    const auto publish = [&](int32_t source) { publish_rows(p, round, source); };
    stage_rows(p, plan, num_rows, publish, table);
  } else if (blockIdx.x == 0) {
    for (int32_t source = thread; source < ep_size; source += threads) {
      if (is_active(p, source)) publish_rows(p, round, source);
    }
  }
  // One lane a peer: thousands of pollers of one line delay the flag itself.
  bool ready = true;
  for (int32_t owner = thread; owner < ep_size; owner += threads) {
    if (is_active(p, owner)) ready &= await_rows(p, round, owner);
  }
  const bool all_ready = __syncthreads_or(!ready) == 0;
  allow_next_kernel();
  if (blockIdx.x == 0 && thread == 0) {
    DeviceState* const state = own_segment(p.workspace).state();
    state->dispatch_epoch = round.epoch;
    state->dispatch_items = 0;
  }
  return all_ready && !round.poisoned;
}

// What peers wrote by ordinary stores, and this thread has waited for, is ordered before its later
// bulk copies, which go another way to memory.
__device__ inline void fence_peers_to_bulk() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace moe_ep::cake
