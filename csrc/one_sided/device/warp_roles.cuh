// What the warps of a CTA tell each other where some work while others wait, so that they have no
// barrier in common. All of it is in shared memory; a CTA barrier follows `init`.
#pragma once

#include <cstdint>

#include "one_sided/device/routing.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::one_sided {

// What the warp that speaks with the peers has heard: whether sums may be formed.
class Verdict {
 public:
  // By one thread.
  __device__ void init() { given_.init(); }
  // By all lanes of one warp, once; `ready`: what this lane has heard. Who awaits it sees what
  // these lanes have waited for.
  __device__ void give(bool ready) {
    const bool valid = __all_sync(kAllLanes, ready);
    __syncwarp();
    if (lane_id() != 0) return;
    valid_ = valid;
    given_.arrive();
  }
  __device__ bool await() {
    given_.wait(0);
    return valid_;
  }

 private:
  BulkBarrier given_;
  bool valid_;
};

// Gives leave to the next kernel when all warps of the CTA have had their last wait on a peer.
class LastWait {
 public:
  // By one thread.
  __device__ void init(uint32_t warps) { waiting_ = warps; }
  // By all lanes of a warp, once.
  __device__ void is_over() {
    __syncwarp();
    if (lane_id() == 0 && atomicSub(&waiting_, 1u) == 1) allow_next_kernel();
  }

 private:
  uint32_t waiting_;  // warps
};

}  // namespace moe_ep::one_sided
