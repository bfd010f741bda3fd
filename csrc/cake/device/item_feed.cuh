// Items of work, each a part of one token's sum, from a counter in device memory: SMs differ in
// speed by 20 %, and a CTA that starts late must find nothing left. Each is for one warp.
#pragma once

#include <cstdint>

#include "cake/cuda_params.h"
#include "cake/device/routing.cuh"
#include "cake/device/token_rows.cuh"
#include "cake/device/workspace.cuh"

namespace moe_ep::cake {

inline constexpr uint32_t kNoItem = 0xFFFFFFFFu;

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
  uint32_t index;  // at or above the total: none
  SendSlot slot;   // as load_slot gives it
};

// Works ahead: while an item is summed, the next one's slots are being loaded, and the number of
// the one after that is on its way.
class ItemFeed {
 public:
  __device__ ItemFeed(const CombineKernelParams& p, uint32_t total, uint32_t items_per_token)
      : p_(p), total_(total), items_per_token_(items_per_token) {}

  // The first of `count` items in a row.
  __device__ uint32_t take(uint32_t count) {
    const uint32_t first = lane_id() == 0 ? add_to_counter(count) : 0;
    return __shfl_sync(kAllLanes, first, 0);
  }
  __device__ Item at(uint32_t index) const {
    if (index >= total_) return {index, {-1, 0}};
    return {index, load_slot(p_, static_cast<int32_t>(index / items_per_token_))};
  }
  // Takes the next item but one. Before the first call of `next`, or there is none.
  __device__ void look_ahead() {
    if (lane_id() == 0) taken_ = add_to_counter(1);
  }
  __device__ Item next() {
    const uint32_t index = __shfl_sync(kAllLanes, taken_, 0);
    if (index < total_) look_ahead();
    return at(index);
  }

 private:
  __device__ uint32_t add_to_counter(uint32_t count) {
    return atomicAdd(&own_segment(p_.workspace).state()->combine_items, count);
  }

  const CombineKernelParams& p_;
  uint32_t total_;
  uint32_t items_per_token_;
  uint32_t taken_ = kNoItem;  // of lane 0
};

}  // namespace moe_ep::cake
