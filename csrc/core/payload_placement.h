// Where the payloads of a round lie in the workspace. Host, device and Python read the same struct.
#pragma once

#include <cstdint>

#include "core/geometry.h"
#include "core/host_device.h"
#include "core/limits.h"
#include "core/workspace_layout.h"

namespace moe_ep {

// Where the payloads of one round lie inside the payload region: one after the other, each of them
// rank-major, `[ep_size * tokens_per_rank]` rows of row_bytes[i], pitch[i] apart.
struct PayloadPlacement {
  uint64_t offset[kMaxPayloads] = {};  // from the start of the segment
  uint64_t pitch[kMaxPayloads] = {};
  int32_t num_payloads = 0;

  MOE_EP_HOST_DEVICE static constexpr PayloadPlacement of(const Geometry& g,
                                                          int64_t tokens_per_rank,
                                                          const int64_t* row_bytes,
                                                          int32_t num_payloads) {
    const auto rows = static_cast<uint64_t>(g.ep_size) * static_cast<uint64_t>(tokens_per_rank);
    PayloadPlacement placement;
    placement.num_payloads = num_payloads;
    uint64_t next = WorkspaceLayout::of(g).payloads.offset;
    for (int32_t i = 0; i < num_payloads; ++i) {
      placement.offset[i] = next;
      placement.pitch[i] = row_pitch(row_bytes[i]);
      next = LayoutBuilder::align_up(next + rows * placement.pitch[i]);
    }
    return placement;
  }
};

}  // namespace moe_ep
