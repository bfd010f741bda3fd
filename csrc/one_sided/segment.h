// Typed access to the regions of one rank's segment.
#pragma once

#include <cstdint>

#include "core/payload_placement.h"
#include "core/workspace_layout.h"
#include "one_sided/params.h"

namespace moe_ep::one_sided {

class Segment {
 public:
  Segment(const WorkspaceView& workspace, const WorkspaceLayout& layout, int32_t rank)
      : base_(workspace.segment(rank)), layout_(layout) {}

  ControlBlock& control() const { return *at<ControlBlock>(layout_.control.offset); }
  RoundHeader& round_header(int32_t source) const {
    return *at<RoundHeader>(layout_.round_headers.offset +
                            static_cast<uint64_t>(source) * WorkspaceLayout::kHeaderStride);
  }
  CombineFlag& combine_flag(int32_t owner) const {
    return *at<CombineFlag>(layout_.combine_flags.offset +
                            static_cast<uint64_t>(owner) * kFlagAlignment);
  }
  SendSlot* send_slots() const { return at<SendSlot>(layout_.send_slots.offset); }
  int32_t* recv_counts() const { return at<int32_t>(layout_.recv_counts.offset); }
  int32_t* eplb_stats() const { return at<int32_t>(layout_.eplb_stats.offset); }
  int32_t* topk_ids() const { return at<int32_t>(layout_.topk_ids.offset); }
  float* topk_weights() const { return at<float>(layout_.topk_weights.offset); }
  uint8_t* combine_row(int64_t row, uint64_t pitch) const {
    return bytes(layout_.combine_rows.offset + static_cast<uint64_t>(row) * pitch);
  }
  uint8_t* payload_row(const PayloadPlacement& placement, int32_t payload, int64_t row) const {
    return bytes(placement.offset[payload] + static_cast<uint64_t>(row) * placement.pitch[payload]);
  }
  uint8_t* bytes(uint64_t offset) const { return base_ + offset; }

 private:
  template <typename T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

  uint8_t* base_;
  const WorkspaceLayout& layout_;
};

}  // namespace moe_ep::one_sided
