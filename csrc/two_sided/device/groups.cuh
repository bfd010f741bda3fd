// How the CTAs of a grid get their channels.
#pragma once

#include <cstdint>

#include "transport/device/warp.cuh"
#include "two_sided/channels.h"

namespace moe_ep::two_sided {

inline constexpr int kCtaThreads = CtaShape::kWarps * kWarpSize;
// For the registers. Three leave a thread 80, and one that stands for several ranks needs more.
// kWords: how many.
template <int kWords>
inline constexpr int kCtasPerSm = kWords == 1 ? 3 : 2;

// Groups of channels from a counter, in ascending order, one after the other: docs/two_sided.md
// says why they must be.
class Groups {
 public:
  __device__ Groups(uint32_t* counter, const StreamPlan& plan, const CtaShape& shape)
      : counter_(counter), total_(static_cast<uint32_t>(shape.groups(plan))) {}

  // By all threads of a CTA, which are done with the group before. False: there is none left.
  __device__ bool take(int32_t* group) {
    __shared__ uint32_t taken;
    __syncthreads();  // the one before was read by all
    if (threadIdx.x == 0) taken = atomicAdd(counter_, 1u);
    __syncthreads();
    *group = static_cast<int32_t>(taken);
    return taken < total_;
  }

 private:
  uint32_t* counter_;
  uint32_t total_;
};

// What a warp does in a group.
struct Duty {
  int32_t channel;    // none, if there are not so many
  int32_t peer_warp;  // which of those at the peers; -1: it is at the tokens

  __device__ Duty(const CtaShape& shape, int32_t group) {
    const int32_t warp = static_cast<int32_t>(threadIdx.x) / kWarpSize;
    const int32_t in_group = warp / shape.warps_per_channel();
    channel = group * shape.channels + in_group;
    peer_warp = warp - in_group * shape.warps_per_channel() - 1;
  }
};

}  // namespace moe_ep::two_sided
