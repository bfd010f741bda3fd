// The round that a combine is in, as dispatch has left it in the state of the rank.
#pragma once

#include <cstddef>
#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::one_sided {

struct RoundWords {
  uint4 sizes;  // epoch, poisoned epoch, num_tokens, tokens_per_rank
  uint64_t first_active;
  uint32_t failed;

  // Sends three loads on their way, and looks at none of them.
  __device__ static RoundWords load(const DeviceState& state) {
    constexpr size_t kBegin = offsetof(DeviceState, combine_epoch);
    static_assert(offsetof(DeviceState, poisoned_epoch) == kBegin + 4 &&
                  offsetof(DeviceState, num_tokens) == kBegin + 8 &&
                  offsetof(DeviceState, tokens_per_rank) == kBegin + 12);
    return {*reinterpret_cast<const uint4*>(&state.combine_epoch), state.active.words[0],
            *const_cast<const volatile uint32_t*>(&state.failed)};
  }
};

class CombineRound {
 public:
  __device__ CombineRound(const CombineKernelParams& p, const DeviceState* state,
                          const RoundWords& words)
      : p_(p), state_(*state), words_(words) {}
  __device__ CombineRound(const CombineKernelParams& p, const DeviceState* state)
      : CombineRound(p, state, RoundWords::load(*state)) {}

  __device__ uint32_t epoch() const { return words_.sizes.x; }
  // The ranks disagreed in dispatch: sums are NaN.
  __device__ bool poisoned() const { return words_.sizes.y == words_.sizes.x; }
  // Not called with the sizes of the dispatch.
  __device__ bool misused() const {
    return static_cast<int32_t>(words_.sizes.z) != p_.num_tokens ||
           static_cast<int32_t>(words_.sizes.w) != p_.tokens_per_rank;
  }
  // A wait has expired before: nothing may be waited for any more. Others may see it later.
  __device__ bool failed() const { return words_.failed != 0; }
  // As dispatch has found it.
  __device__ bool is_active(int32_t rank) const {
    if (rank < kRanksPerMaskWord) return (words_.first_active >> rank) & 1;
    return state_.active.contains(rank);
  }
  // Ranks 0 to 63 of those.
  __device__ uint64_t first_active() const { return words_.first_active; }
  // A rank that is misused has no rows to offer, and says so by a signature that matches nobody's.
  __device__ uint32_t signature() const { return misused() ? ~p_.signature : p_.signature; }

 private:
  const CombineKernelParams& p_;
  const DeviceState& state_;
  RoundWords words_;
};

// In CTA 0 of a grid that sets its flags at once, two warps get ready for that at the same time:
// the one that speaks with the peers is at the fence, which would wait for its loads, while the
// first one looks the round up for it.
__device__ inline RoundWords& lent_round() {
  __shared__ RoundWords words;
  return words;
}
inline constexpr int kRoundBarrier = 1;

__device__ inline void lend_round(const CombineKernelParams& p) {
  const RoundWords words = RoundWords::load(*own_segment(p.workspace).state());
  if (lane_id() == 0) lent_round() = words;
  arrive_at_barrier<kRoundBarrier, 2 * kWarpSize>();
}
__device__ inline RoundWords borrow_round() {
  wait_at_barrier<kRoundBarrier, 2 * kWarpSize>();
  return lent_round();
}

}  // namespace moe_ep::one_sided
