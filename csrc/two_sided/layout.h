// Where everything is in one rank's segment of a two-sided workspace. Nothing here grows with the
// number of tokens: rows only pass through, and what they become is in tensors.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/workspace_layout.h"
#include "two_sided/geometry.h"

namespace moe_ep::two_sided {

// How far the round in flight is, besides ControlBlock::phase. Private to a rank.
struct RoundState {
  uint32_t rows_delivered;    // 1 between alltoallv and combine
  uint64_t send_tokens_hash;  // of what prepare returned: the other calls must be given the same
};

struct FifoLayout {
  Region control;        // ControlBlock
  Region round_state;    // RoundState
  Region bell;           // uint32, rung by every peer that fills or empties a slot of ours
  Region round_headers;  // [ep_size] RoundHeader, kHeaderStride apart; slot s is written by rank s
  Region combine_flags;  // [ep_size] CombineFlag, kFlagAlignment apart; slot p is written by rank p
  // [ep_size] uint32, kFlagAlignment apart; word s is written by rank s: how many slots it has ever
  // filled in our FIFO s.
  Region heads;
  // [ep_size] uint32, kFlagAlignment apart; word p is written by rank p: how many slots it has ever
  // emptied of its FIFO that we fill.
  Region tails;
  Region send_counts;  // [ep_size] int32, rows for each rank in the round in flight; private
  Region recv_counts;  // [ep_size] int32, rows from each rank; private
  Region slots;        // [ep_size, num_slots] slots, slot_pitch apart; FIFO s is filled by rank s
  uint64_t slot_pitch = 0;
  uint64_t segment_bytes = 0;

  static constexpr uint64_t kHeaderStride = WorkspaceLayout::kHeaderStride;

  // What `initialize` zeroes begins at 0 and ends here.
  MOE_EP_HOST_DEVICE constexpr uint64_t end_of_control() const { return slots.offset; }

  MOE_EP_HOST_DEVICE static constexpr FifoLayout of(const Geometry& g) {
    const auto ranks = static_cast<uint64_t>(g.ep_size);
    LayoutBuilder builder;
    FifoLayout w;
    w.control = builder.take(sizeof(ControlBlock));
    w.round_state = builder.take(sizeof(RoundState));
    w.bell = builder.take(sizeof(uint32_t));
    w.round_headers = builder.take(ranks * kHeaderStride);
    w.combine_flags = builder.take(ranks * kFlagAlignment);
    w.heads = builder.take(ranks * kFlagAlignment);
    w.tails = builder.take(ranks * kFlagAlignment);
    w.send_counts = builder.take(ranks * sizeof(int32_t));
    w.recv_counts = builder.take(ranks * sizeof(int32_t));
    w.slot_pitch = LayoutBuilder::align_up(static_cast<uint64_t>(g.slot_bytes));
    w.slots = builder.take(ranks * static_cast<uint64_t>(g.num_slots) * w.slot_pitch);
    w.segment_bytes = builder.total();
    return w;
  }
};

}  // namespace moe_ep::two_sided
