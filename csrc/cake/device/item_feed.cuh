// Items of work, each a part of one token's sum, from a counter in device memory: SMs differ in
// speed by 20 %, and a CTA that starts late must find nothing left. Each is for one warp.
#pragma once

#include <cstdint>

#include "cake/cuda_params.h"
#include "cake/device/memory_access.cuh"
#include "cake/device/routing.cuh"
#include "cake/device/token_rows.cuh"
#include "cake/device/workspace.cuh"
#include "core/fast_divide.h"

namespace moe_ep::cake {

// With few items, fewer warps of each CTA take some, so that all SMs do.
struct Share {
  uint32_t warps;        // of a CTA
  uint32_t first_items;  // that a warp takes at first
  bool more;             // whether there may be others after that

  __device__ Share(uint32_t total, uint32_t warps_per_cta, uint32_t max_first_items) {
    const uint32_t ctas = gridDim.x;
    warps = min(warps_per_cta, total / ctas + (total % ctas != 0 ? 1 : 0));
    first_items = warps == 0 ? 1 : max(1u, min(max_first_items, total / (ctas * warps)));
    more = total > ctas * warps;
  }
};

struct Item {
  uint32_t token;  // kNoItem: none
  uint32_t part;   // of the token's sum
  SendSlot slot;   // as load_slot gives it
};
inline constexpr Item kNothing{kNoItem, 0, {-1, 0}};

// Works ahead: while an item is summed, the next one's slots are being loaded, and the number of
// the one after that is on its way.
class ItemFeed {
 public:
  __device__ ItemFeed(const CombineKernelParams& p, uint32_t total, uint32_t parts,
                      FastDivider by_parts)
      : p_(p), total_(total), parts_(parts), by_parts_(by_parts) {}

  // The first of `count` items in a row.
  __device__ uint32_t take(uint32_t count) {
    const uint32_t first = lane_id() == 0 ? atomicAdd(counter(), count) : 0;
    return __shfl_sync(kAllLanes, first, 0);
  }
  __device__ Item at(uint32_t index) const {
    if (index >= total_) return kNothing;
    const int32_t token = by_parts_.divide(static_cast<int32_t>(index));
    const auto first = static_cast<uint32_t>(token) * parts_;
    return {static_cast<uint32_t>(token), index - first, load_slot(p_, slot_address(p_, token))};
  }
  // Takes the next item but one. Before the first call of `next`, or there is none. An increment
  // and not an addition of 1: the assembler sums additions over the lanes of a warp, and spreads
  // the result at once, which waits for it (0.7 us).
  __device__ void look_ahead() {
    if (lane_id() == 0) taken_ = atomicInc(counter(), kNoItem - 1);
  }
  __device__ Item next() {
    const uint32_t index = __shfl_sync(kAllLanes, taken_, 0);
    if (index < total_) look_ahead();
    return at(index);
  }

 private:
  __device__ uint32_t* counter() const { return &own_segment(p_.workspace).state()->combine_items; }

  const CombineKernelParams& p_;
  uint32_t total_;
  uint32_t parts_;
  FastDivider by_parts_;
  uint32_t taken_ = kNoItem;  // of lane 0
};

}  // namespace moe_ep::cake
