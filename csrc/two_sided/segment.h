// Typed access to the regions of one rank's segment.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "two_sided/layout.h"
#include "two_sided/params.h"

namespace moe_ep::two_sided {

class Segment {
 public:
  MOE_EP_HOST_DEVICE Segment(const WorkspaceView& workspace, const FifoLayout& layout, int32_t rank)
      : base_(workspace.segment(rank)),
        layout_(layout),
        num_channels_(workspace.geometry.num_channels),
        slot_mask_(static_cast<uint32_t>(workspace.geometry.num_slots) - 1) {}

  MOE_EP_HOST_DEVICE ControlBlock& control() const {
    return *at<ControlBlock>(layout_.control.offset);
  }
  MOE_EP_HOST_DEVICE RoundState& round_state() const {
    return *at<RoundState>(layout_.round_state.offset);
  }
  MOE_EP_HOST_DEVICE DeviceRound& device_round() const {
    return *at<DeviceRound>(layout_.device_round.offset);
  }
  MOE_EP_HOST_DEVICE uint32_t* bell() const { return at<uint32_t>(layout_.bell.offset); }
  MOE_EP_HOST_DEVICE RoundHeader& round_header(int32_t source) const {
    return *at<RoundHeader>(layout_.round_headers.offset +
                            static_cast<uint64_t>(source) * FifoLayout::kHeaderStride);
  }
  MOE_EP_HOST_DEVICE CombineFlag& combine_flag(int32_t owner) const {
    return *at<CombineFlag>(layout_.combine_flags.offset +
                            static_cast<uint64_t>(owner) * kFlagAlignment);
  }
  MOE_EP_HOST_DEVICE uint32_t* head(int32_t source, int32_t channel = 0) const {
    return at<uint32_t>(layout_.heads.offset + fifo(source, channel) * kFlagAlignment);
  }
  MOE_EP_HOST_DEVICE uint32_t* tail(int32_t destination, int32_t channel = 0) const {
    return at<uint32_t>(layout_.tails.offset + fifo(destination, channel) * kFlagAlignment);
  }
  MOE_EP_HOST_DEVICE int32_t* send_counts() const {
    return at<int32_t>(layout_.send_counts.offset);
  }
  MOE_EP_HOST_DEVICE int32_t* recv_counts() const {
    return at<int32_t>(layout_.recv_counts.offset);
  }
  // Of one rank: num_channels + 1 of them.
  MOE_EP_HOST_DEVICE int32_t* row_bounds(int32_t source) const {
    return bounds(layout_.row_bounds, source);
  }
  MOE_EP_HOST_DEVICE int32_t* recv_bounds(int32_t source) const {
    return bounds(layout_.recv_bounds, source);
  }
  MOE_EP_HOST_DEVICE int32_t* send_bounds(int32_t destination) const {
    return bounds(layout_.send_bounds, destination);
  }
  MOE_EP_HOST_DEVICE int32_t* list_begins() const {
    return at<int32_t>(layout_.list_begins.offset);
  }
  MOE_EP_HOST_DEVICE uint32_t* sent(int32_t destination, int32_t channel) const {
    return at<uint32_t>(layout_.sent.offset) + fifo(destination, channel);
  }
  MOE_EP_HOST_DEVICE uint32_t* taken(int32_t source, int32_t channel) const {
    return at<uint32_t>(layout_.taken.offset) + fifo(source, channel);
  }
  // The slot that the `number`-th filling of a FIFO of rank `source` is in. Numbers wrap at 2^32,
  // which the number of slots divides.
  MOE_EP_HOST_DEVICE uint8_t* slot(int32_t source, uint32_t number, int32_t channel = 0) const {
    const uint64_t slots = static_cast<uint64_t>(slot_mask_) + 1;
    const uint64_t index = fifo(source, channel) * slots + (number & slot_mask_);
    return base_ + layout_.slots.offset + index * layout_.slot_pitch;
  }
  // All slots that rank `source` fills.
  MOE_EP_HOST_DEVICE uint8_t* slots(int32_t source) const {
    const uint64_t slots = static_cast<uint64_t>(slot_mask_) + 1;
    return base_ + layout_.slots.offset + fifo(source, 0) * slots * layout_.slot_pitch;
  }
  MOE_EP_HOST_DEVICE uint8_t* bytes(uint64_t offset) const { return base_ + offset; }

 private:
  MOE_EP_HOST_DEVICE uint64_t fifo(int32_t rank, int32_t channel) const {
    return static_cast<uint64_t>(rank) * static_cast<uint32_t>(num_channels_) +
           static_cast<uint32_t>(channel);
  }
  MOE_EP_HOST_DEVICE int32_t* bounds(const Region& region, int32_t rank) const {
    return at<int32_t>(region.offset) +
           static_cast<int64_t>(rank) * (static_cast<int64_t>(num_channels_) + 1);
  }
  template <typename T>
  MOE_EP_HOST_DEVICE T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

  uint8_t* base_;
  const FifoLayout& layout_;
  int32_t num_channels_;
  uint32_t slot_mask_;
};

}  // namespace moe_ep::two_sided
