// Typed access to the regions of a rank's segment, for kernels; some of it also for launchers,
// which compute addresses once that a kernel would compute at each use.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "one_sided/cuda_params.h"

namespace moe_ep::one_sided {

class DeviceSegment {
 public:
  MOE_EP_HOST_DEVICE DeviceSegment(const DeviceWorkspace& workspace, int32_t rank)
      : base_(workspace.base + rank * workspace.rank_stride), w_(workspace) {}

  __device__ ControlBlock* control() const { return at<ControlBlock>(w_.layout.control); }
  __device__ RoundHeader* round_header(int32_t source) const {
    return at<RoundHeader>(w_.layout.round_headers) + source;
  }
  __device__ CombineFlag* combine_flag(int32_t owner) const {
    return reinterpret_cast<CombineFlag*>(base_ + w_.layout.combine_flags.offset +
                                          static_cast<uint64_t>(owner) * kFlagAlignment);
  }
  MOE_EP_HOST_DEVICE DeviceState* state() const { return at<DeviceState>(w_.layout.device_state); }
  __device__ uint32_t* dispatch_arrivals(int32_t source) const {
    return reinterpret_cast<uint32_t*>(base_ + w_.layout.dispatch_arrivals.offset +
                                       static_cast<uint64_t>(source) * kFlagAlignment);
  }
  __device__ int32_t* recv_counts() const { return at<int32_t>(w_.layout.recv_counts); }
  // Of one token: max_destinations of them.
  MOE_EP_HOST_DEVICE SendSlot* send_slots(int32_t token) const {
    return at<SendSlot>(w_.layout.send_slots) + static_cast<int64_t>(token) * w_.max_destinations;
  }
  __device__ int32_t* eplb_stats(int32_t source) const {
    return at<int32_t>(w_.layout.eplb_stats) +
           static_cast<int64_t>(source) * w_.eplb_stats_num_experts;
  }
  __device__ int32_t* topk_ids(int64_t row) const {
    return at<int32_t>(w_.layout.topk_ids) + row * w_.top_k;
  }
  __device__ float* topk_weights(int64_t row) const {
    return at<float>(w_.layout.topk_weights) + row * w_.top_k;
  }
  __device__ uint8_t* payload_row(const PayloadPlacement& placement, int32_t payload,
                                  int64_t row) const {
    return base_ + placement.offset[payload] +
           static_cast<uint64_t>(row) * placement.pitch[payload];
  }
  MOE_EP_HOST_DEVICE uint8_t* combine_row(int64_t row, uint64_t pitch) const {
    return base_ + w_.layout.combine_rows.offset + static_cast<uint64_t>(row) * pitch;
  }
  // Of the parts of a row that was pushed here.
  __device__ uint32_t* row_flags(int64_t row) const {
    return at<uint32_t>(w_.layout.row_flags) + row * int64_t{kMaxRowParts};
  }
  // Slot `row` of what rank `from` sends here.
  __device__ uint8_t* dispatch_packets(int32_t from, int32_t row) const {
    const auto slot = static_cast<uint64_t>(from) * static_cast<uint32_t>(w_.low_latency_tokens) +
                      static_cast<uint32_t>(row);
    return base_ + w_.layout.dispatch_packets.offset + slot * w_.dispatch_slot_bytes;
  }
  __device__ uint8_t* stats_packets(int32_t from) const {
    return base_ + w_.layout.stats_packets.offset +
           static_cast<uint64_t>(from) * w_.stats_slot_bytes;
  }
  // Slot `row` of what rank `from` has made of the rows from here.
  __device__ uint8_t* combine_packets(int32_t from, int32_t row) const {
    return base_ + w_.layout.combine_packets.offset + push_slot(from, row) * w_.combine_slot_bytes;
  }
  // Which slot of its region that is.
  __device__ uint64_t push_slot(int32_t from, int32_t row) const {
    return static_cast<uint64_t>(from) * static_cast<uint32_t>(w_.push_slots) +
           static_cast<uint32_t>(row);
  }

 private:
  template <typename T>
  MOE_EP_HOST_DEVICE T* at(const Region& region) const {
    return reinterpret_cast<T*>(base_ + region.offset);
  }

  uint8_t* base_;
  const DeviceWorkspace& w_;
};

static_assert(WorkspaceLayout::kHeaderStride == sizeof(RoundHeader));

MOE_EP_HOST_DEVICE inline DeviceSegment own_segment(const DeviceWorkspace& workspace) {
  return {workspace, workspace.ep_rank};
}

}  // namespace moe_ep::one_sided
