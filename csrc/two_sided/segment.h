// Typed access to the regions of one rank's segment.
#pragma once

#include <cstdint>

#include "two_sided/layout.h"
#include "two_sided/params.h"

namespace moe_ep::two_sided {

class Segment {
 public:
  Segment(const WorkspaceView& workspace, const FifoLayout& layout, int32_t rank)
      : base_(workspace.segment(rank)),
        layout_(layout),
        slot_mask_(static_cast<uint32_t>(workspace.geometry.num_slots) - 1) {}

  ControlBlock& control() const { return *at<ControlBlock>(layout_.control.offset); }
  RoundState& round_state() const { return *at<RoundState>(layout_.round_state.offset); }
  uint32_t* bell() const { return at<uint32_t>(layout_.bell.offset); }
  RoundHeader& round_header(int32_t source) const {
    return *at<RoundHeader>(layout_.round_headers.offset +
                            static_cast<uint64_t>(source) * FifoLayout::kHeaderStride);
  }
  CombineFlag& combine_flag(int32_t owner) const {
    return *at<CombineFlag>(layout_.combine_flags.offset + flag_offset(owner));
  }
  uint32_t* head(int32_t source) const {
    return at<uint32_t>(layout_.heads.offset + flag_offset(source));
  }
  uint32_t* tail(int32_t destination) const {
    return at<uint32_t>(layout_.tails.offset + flag_offset(destination));
  }
  int32_t* send_counts() const { return at<int32_t>(layout_.send_counts.offset); }
  int32_t* recv_counts() const { return at<int32_t>(layout_.recv_counts.offset); }
  // The slot that the `number`-th filling of FIFO `source` is in. Numbers wrap at 2^32, which the
  // number of slots divides.
  uint8_t* slot(int32_t source, uint32_t number) const {
    const uint64_t slots = static_cast<uint64_t>(slot_mask_) + 1;
    const uint64_t index = static_cast<uint64_t>(source) * slots + (number & slot_mask_);
    return base_ + layout_.slots.offset + index * layout_.slot_pitch;
  }
  uint8_t* bytes(uint64_t offset) const { return base_ + offset; }

 private:
  static uint64_t flag_offset(int32_t rank) { return static_cast<uint64_t>(rank) * kFlagAlignment; }
  template <typename T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

  uint8_t* base_;
  const FifoLayout& layout_;
  uint32_t slot_mask_;
};

}  // namespace moe_ep::two_sided
