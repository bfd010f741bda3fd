// Items of work, each a part of one token's sum, from a counter in device memory: SMs differ in
// speed by 20 %, and a CTA that starts late must find nothing left. Each is for one warp.
#pragma once

#include <cstdint>

#include "core/fast_divide.h"
#include "core/host_device.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/token_rows.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"
#include "transport/device/share.cuh"

namespace moe_ep::one_sided {

struct Item {
  uint32_t token;  // kNoItem: none
  uint32_t part;   // of the token's sum
  SendSlot slot;   // as load_slot gives it
};
inline constexpr Item kNothing{kNoItem, 0, {-1, 0}};

// What all items have in common.
struct ItemPlan {
  uint32_t* counter;
  const SendSlot* slots;  // of token 0
  uint32_t total;
  uint32_t parts;  // items of a token
  FastDivider by_parts;

  MOE_EP_HOST_DEVICE ItemPlan(const CombineKernelParams& p, uint32_t items_of_token,
                              FastDivider by_items_of_token)
      : counter(&own_segment(p.workspace).state()->combine_items),
        slots(own_segment(p.workspace).send_slots(0)),
        total(static_cast<uint32_t>(p.num_tokens) * items_of_token),
        parts(items_of_token),
        by_parts(by_items_of_token) {}
};

// Works ahead: while an item is summed, the next one's slots are being loaded, and the number of
// the one after that is on its way.
class ItemFeed {
 public:
  __device__ ItemFeed(const CombineKernelParams& p, const ItemPlan& plan)
      : p_(p), plan_(plan), counter_(plan.counter) {}

  // The first of `count` items in a row.
  __device__ uint32_t take(uint32_t count) {
    const uint32_t first = lane_id() == 0 ? counter_.take(count) : kNoItem;
    return __shfl_sync(kAllLanes, first, 0);
  }
  __device__ Item at(uint32_t index) const {
    if (index >= plan_.total) return kNothing;
    const auto token = static_cast<uint32_t>(plan_.by_parts.divide(static_cast<int32_t>(index)));
    const auto slots = static_cast<uint32_t>(p_.workspace.max_destinations);
    return {token, index - token * plan_.parts,
            load_slot(p_, lane_slot(plan_.slots + uint64_t{token} * slots))};
  }
  // Takes the next item but one. Before the first call of `next`, or there is none.
  __device__ void look_ahead() {
    if (lane_id() == 0) taken_ = counter_.take(1);
  }
  __device__ Item next() {
    const uint32_t index = __shfl_sync(kAllLanes, taken_, 0);
    if (index < plan_.total) look_ahead();
    return at(index);
  }

 private:
  const CombineKernelParams& p_;
  const ItemPlan& plan_;
  ItemCounter counter_;
  uint32_t taken_ = kNoItem;  // of lane 0
};

}  // namespace moe_ep::one_sided
