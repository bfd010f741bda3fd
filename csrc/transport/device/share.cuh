// How the items of a launch are dealt out to its warps.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/host_device.h"

namespace moe_ep {

// With few items, fewer warps of each CTA take some, so that all SMs do. Two divisions: better on
// the host.
struct Share {
  uint32_t warps = 0;        // of a CTA that take items
  uint32_t first_items = 1;  // that a warp takes at first
  bool more = false;         // whether there may be others after that

  constexpr Share() = default;
  MOE_EP_HOST_DEVICE Share(uint32_t total, uint32_t ctas, uint32_t warps_per_cta,
                           uint32_t max_first_items) {
    warps = min(warps_per_cta, total / ctas + (total % ctas != 0 ? 1 : 0));
    first_items = warps == 0 ? 1 : max(1u, min(max_first_items, total / (ctas * warps)));
    more = total > ctas * warps;
  }
};

}  // namespace moe_ep
