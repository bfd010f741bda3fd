// How combine kernels that pull begin: the expert rows of this rank are published, those of the
// others awaited. Those that push exchange the same flags beside their rows.
//
// A flag {epoch, signature} goes from each owner p to each active source s, into slot p of s, when
// all rows are complete at p: by CTA 0 at once if the experts wrote them in place, else by the warp
// that stages the last of them. Each CTA waits for the flags of all active ranks, also those
// that it has no rows from: their flag says that what they received in this round is consumed, so
// that the next dispatch may write it. A flag is written again in the next combine, which comes
// after the source's next dispatch, so it cannot be ahead.
//
// One warp of each CTA does all of this and sums nothing, so that a flag neither leaves nor is seen
// later because of what the others wait for: slots, counters, addresses.
#pragma once

#include <cstdint>

#include "core/device_signal.cuh"
#include "core/epoch.h"
#include "one_sided/combine_plan.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/bounded_wait.cuh"
#include "one_sided/device/combine_round.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/stage_rows.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/disagreement.cuh"
#include "transport/device/memory_access.cuh"
#include "transport/device/schedule.cuh"

namespace moe_ep::one_sided {

// Which warp of a CTA speaks with the peers: the last one.
__device__ inline bool speaks_with_peers() {
  return threadIdx.x / kWarpSize == blockDim.x / kWarpSize - 1;
}

// Slot `owner` of the flags of `source`.
__device__ inline CombineFlag* flag_at(const CombineKernelParams& p, int32_t source,
                                       int32_t owner) {
  return DeviceSegment(p.workspace, source).combine_flag(owner);
}

// Where the warp that speaks with the peers reads and writes; lane r for rank r.
struct PeerAddresses {
  DeviceState* state;
  CombineFlag* flag_there;
  CombineFlag* flag_here;

  __device__ explicit PeerAddresses(const CombineKernelParams& p)
      : state(own_segment(p.workspace).state()),
        flag_there(flag_at(p, lane_id(), p.workspace.ep_rank)),
        flag_here(flag_at(p, p.workspace.ep_rank, lane_id())) {}
};

// When a combine sets its flags.
enum class FlagsAreSet {
  kBehindFence,  // at once: the experts wrote the rows in place
  // At once: no rows are behind them, only that this rank has read what it was sent. So nothing
  // that a peer reads needs their order, and what they allow it to overwrite was read by kernels
  // that are over: a load that has its value does not see a later store. The fence took 0.6 to 1.4
  // us.
  kWithoutFence,
  kLater,  // by whoever has read the last row
};

// By one warp of CTA 0, behind the fence if there is to be one.
__device__ inline void set_flags_at_once(const CombineKernelParams& p, const CombineRound& round,
                                         CombineFlag* flag) {
#pragma unroll 1
  for (int32_t source = lane_id(); source < p.workspace.ep_size; source += kWarpSize) {
    if (!round.failed() && round.is_active(source)) {
      store_after_fence(flag, round.epoch(), round.signature());
    }
    flag = flag_at(p, source + kWarpSize, p.workspace.ep_rank);
  }
}

// By one warp, which knows that all rows have been read from where the experts left them.
__device__ inline void publish_read_rows(const CombineKernelParams& p, const CombineRound& round) {
#pragma unroll 1
  for (int32_t source = lane_id(); source < p.workspace.ep_size; source += kWarpSize) {
    if (!round.is_active(source)) continue;
    signal_store(flag_at(p, source, p.workspace.ep_rank), round.epoch(), round.signature(),
                 p.workspace.reach);
  }
}

// Where flags follow reads, and these are dealt out in `shares`: by a warp that has done its share.
// The one that does the last sets the flags; it waits for nobody.
__device__ inline void publish_when_read(const CombineKernelParams& p, const CombineRound& round,
                                         uint32_t shares) {
  __syncwarp();  // lane 0 speaks for what the other lanes have read
  uint32_t done = 0;
  if (lane_id() == 0) {
    done = signal_and_count(&own_segment(p.workspace).state()->staged_items, 1) + 1;
  }
  if (__shfl_sync(kAllLanes, done, 0) != shares) return;
  __syncwarp();  // and hears for them
  publish_read_rows(p, round);
}

// By all threads of every CTA, where the experts did not write their rows in place.
__device__ inline void stage_and_publish_rows(const CombineKernelParams& p, const StagePlan& plan,
                                              StageTable& table) {
  const CombineRound round(p, own_segment(p.workspace).state());
  if (__syncthreads_or(round.failed()) != 0) return;  // another CTA may fail at this moment
  const int32_t* const recv_counts = own_segment(p.workspace).recv_counts();
  const auto num_rows = [&](int32_t source) -> int64_t {
    if (!round.is_active(source)) return -1;
    return round.misused() ? 0 : recv_counts[source];
  };
  stage_rows(p, plan, num_rows, [&] { publish_read_rows(p, round); }, table);
}

// False: the owner was called with something else, or the wait has expired; the host is told. Not
// of the former in a poisoned round: ranks that disagreed in dispatch mostly do so here, too, and
// the host knows it from there.
__device__ inline bool await_rows(const CombineKernelParams& p, const CombineRound& round,
                                  int32_t owner, const CombineFlag* flag) {
  const uint32_t epoch = round.epoch();
  Patience patience;
  for (;;) {
    const Pair seen = poll_pair(flag);
    if (epoch_reached(seen.low, epoch)) {
      if (seen.low != epoch || seen.high == p.signature) return true;
      if (blockIdx.x == 0 && !round.poisoned()) record_combine_disagreement(p.workspace.page);
      return false;
    }
    if (patience.exhausted(p.workspace, Phase::kCombine, owner, epoch, seen.low)) return false;
  }
}

// By all threads of every CTA: waits for the kernel before this one, and stages what the experts
// did not write in place.
template <bool kStaged>
__device__ void begin_combine(const CombineKernelParams& p, const StagePlan& plan) {
  if constexpr (kStaged) {
    __shared__ StageTable table;
    wait_for_previous_kernel();
    stage_and_publish_rows(p, plan, table);
  } else {
    const PeerAddresses peers(p);
    wait_for_previous_kernel_knowing(peers.state, peers.flag_there, peers.flag_here);
    if (blockIdx.x == 0 && threadIdx.x < kWarpSize) lend_round(p);
  }
}

// Whether the experts did not write their rows in place: known when the kernel is compiled, if it
// is one for either.
template <PulledRows kRows>
__device__ bool are_staged(const CombineKernelParams& p) {
  if constexpr (kRows == PulledRows::kEither) {
    return p.expert_output != nullptr;
  } else {
    return kRows == PulledRows::kStaged;
  }
}

// A function of its own, so that what follows has the registers that it would have without it.
__device__ __noinline__ inline void begin_combine_by_staging(const CombineKernelParams& p,
                                                             const StagePlan& plan) {
  begin_combine<true>(p, plan);
}

template <PulledRows kRows>
__device__ void begin_combine(const CombineKernelParams& p, const StagePlan& plan) {
  if constexpr (kRows == PulledRows::kStaged) {
    begin_combine<true>(p, plan);
  } else if (are_staged<kRows>(p)) {
    begin_combine_by_staging(p, plan);
  } else {
    begin_combine<false>(p, plan);
  }
}

// For the next dispatch, whom it loses. Words that no rank is in stay zero.
__device__ inline void keep_mask(const CombineRound& round, DeviceState* state, int32_t ep_size) {
  state->last_active.words[0] = round.first_active();
#pragma unroll 1
  for (int32_t w = 1; w < rank_mask_words(ep_size); ++w) {
    state->last_active.words[w] = state->active.words[w];
  }
}

// The rest of exchange_flags, once the round is known.
__device__ inline bool exchange_flags_of(const CombineKernelParams& p,
                                         const PeerAddresses& addresses, const CombineRound& round,
                                         FlagsAreSet set) {
  if (blockIdx.x == 0) {
    if (set != FlagsAreSet::kLater) set_flags_at_once(p, round, addresses.flag_there);
    if (lane_id() == 0 && !round.failed()) {
      addresses.state->dispatch_epoch = round.epoch();
      if (p.workspace.has_rank_masks) keep_mask(round, addresses.state, p.workspace.ep_size);
      addresses.state->dispatch_items = 0;
    }
  }
  if (round.failed()) return false;
  bool ready = !round.poisoned();
  const CombineFlag* flag = addresses.flag_here;
#pragma unroll 1
  for (int32_t owner = lane_id(); owner < p.workspace.ep_size; owner += kWarpSize) {
    if (round.is_active(owner)) ready &= await_rows(p, round, owner, flag);
    flag = flag_at(p, p.workspace.ep_rank, owner + kWarpSize);
  }
  return ready;
}

// By the warp that speaks with the peers, of every CTA. False: sums may not be formed. One lane a
// peer looks: thousands of pollers of one line delay the flag itself.
__device__ inline bool exchange_flags(const CombineKernelParams& p, FlagsAreSet set) {
  const PeerAddresses addresses(p);
  if (set == FlagsAreSet::kBehindFence && blockIdx.x == 0) {
    // The fence orders what earlier kernels did, so it need not wait for the epoch.
    release_fence(p.workspace.reach);
    return exchange_flags_of(p, addresses, {p, addresses.state, borrow_round()}, set);
  }
  return exchange_flags_of(p, addresses, {p, addresses.state}, set);
}

// Behind begin_combine.
template <PulledRows kRows>
__device__ bool exchange_flags(const CombineKernelParams& p) {
  return exchange_flags(p, are_staged<kRows>(p) ? FlagsAreSet::kLater : FlagsAreSet::kBehindFence);
}

// By all threads of a CTA; `ready` is what exchange_flags has said, and true for the other warps.
// Returns, the same for all threads, whether the CTA's sums may be formed: if not they are NaN.
// After this a kernel waits for nobody.
__device__ inline bool agree_on_rows(bool ready) {
  const bool valid = __syncthreads_or(!ready) == 0;
  if (speaks_with_peers()) allow_next_kernel();  // one warp is enough
  return valid;
}

// What peers wrote by ordinary stores, and this thread has waited for, is ordered before its later
// bulk copies, which go another way to memory.
__device__ inline void fence_peers_to_bulk() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace moe_ep::one_sided
