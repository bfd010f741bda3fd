// How a launch cuts records into items of work and deals them out; the launcher decides.
#pragma once

#include <cstdint>

#include "cake/namespace.h"
#include "core/fast_divide.h"
#include "core/host_device.h"
#include "transport/device/memory_access.cuh"
#include "transport/device/share.cuh"

namespace moe_ep::cake {

struct PipelineShape {
  int32_t warps;   // of a CTA that have stages
  int32_t stages;  // of a warp
  uint32_t parts;  // of a record
  FastDivider by_parts{1};
  uint32_t parts_of_first;   // so many parts lead that are of the first payload alone
  uint32_t part_bytes;       // a multiple of kRowAlignment
  uint32_t last_part_bytes;  // at most part_bytes
  // Of one launch:
  uint32_t num_items;
  Share share;

  MOE_EP_HOST_DEVICE constexpr int32_t bytes() const {
    return warps * stages * static_cast<int32_t>(part_bytes + sizeof(BulkBarrier));
  }
};

// What an item is.
struct RowPart {
  uint32_t token;
  uint32_t part;
};

}  // namespace moe_ep::cake
