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

// On CUDA, in place of both. The CTA of prepare that comes last writes it; alltoallv and combine
// only read it, so that their CTAs need not run together. They take from the counters, prepare
// resets them.
struct DeviceRound {
  alignas(kRegionAlignment) uint32_t epoch;  // of the round in flight
  uint32_t poisoned;                         // 1: the ranks disagreed, no row moves
  int32_t num_tokens;
  int32_t tokens_per_rank;
  uint32_t fields;           // hash of their widths
  uint32_t prepared;         // CTAs of prepare that are done with their slices
  uint32_t invalid_id_lock;  // of the host's record, among CTAs of prepare
  // Set when a wait has expired, and never reset: every later kernel gives up at once.
  alignas(kRegionAlignment) uint32_t failed;
  alignas(kRegionAlignment) uint32_t dispatch_groups;  // of channels, those that are taken
  alignas(kRegionAlignment) uint32_t combine_groups;
};

struct FifoLayout {
  Region control;        // ControlBlock
  Region round_state;    // RoundState
  Region device_round;   // DeviceRound
  Region bell;           // uint32, rung by every peer that fills or empties a slot of ours
  Region round_headers;  // [ep_size] RoundHeader, kHeaderStride apart; slot s is written by rank s
  Region combine_flags;  // [ep_size] CombineFlag, kFlagAlignment apart; slot p is written by rank p
  // [ep_size, num_channels] uint32, kFlagAlignment apart; row s is written by rank s: how many
  // slots it has ever filled in our FIFOs s.
  Region heads;
  // [ep_size, num_channels] uint32, kFlagAlignment apart; row p is written by rank p: how many
  // slots it has ever emptied of its FIFOs that we fill.
  Region tails;
  Region send_counts;  // [ep_size] int32, rows for each rank in the round in flight; private
  Region recv_counts;  // [ep_size] int32, rows from each rank; private
  // CUDA, see token_at_bound: [ep_size, num_channels + 1] int32. Row s of the first is written by
  // rank s, in prepare; the others are private.
  Region row_bounds;
  Region recv_bounds;  // row_bounds, where no peer writes while it is read
  Region send_bounds;
  Region list_begins;  // [ep_size] int32, where the tokens for each rank begin in send_tokens
  // CUDA: [ep_size, num_channels] uint32, private: `heads` at the peers, `tails` at the peers.
  Region sent;
  Region taken;
  // [ep_size, num_channels, num_slots] slots, slot_pitch apart; FIFOs s are filled by rank s
  Region slots;
  uint64_t slot_pitch = 0;
  uint64_t segment_bytes = 0;

  static constexpr uint64_t kHeaderStride = WorkspaceLayout::kHeaderStride;

  // What `initialize` zeroes begins at 0 and ends here.
  MOE_EP_HOST_DEVICE constexpr uint64_t end_of_control() const { return slots.offset; }

  MOE_EP_HOST_DEVICE static constexpr FifoLayout of(const Geometry& g) {
    const auto ranks = static_cast<uint64_t>(g.ep_size);
    const auto channels = static_cast<uint64_t>(g.num_channels);
    const uint64_t bounds = ranks * (channels + 1) * sizeof(int32_t);
    LayoutBuilder builder;
    FifoLayout w;
    w.control = builder.take(sizeof(ControlBlock));
    w.round_state = builder.take(sizeof(RoundState));
    w.device_round = builder.take(sizeof(DeviceRound));
    w.bell = builder.take(sizeof(uint32_t));
    w.round_headers = builder.take(ranks * kHeaderStride);
    w.combine_flags = builder.take(ranks * kFlagAlignment);
    w.heads = builder.take(ranks * channels * kFlagAlignment);
    w.tails = builder.take(ranks * channels * kFlagAlignment);
    w.send_counts = builder.take(ranks * sizeof(int32_t));
    w.recv_counts = builder.take(ranks * sizeof(int32_t));
    w.row_bounds = builder.take(bounds);
    w.recv_bounds = builder.take(bounds);
    w.send_bounds = builder.take(bounds);
    w.list_begins = builder.take(ranks * sizeof(int32_t));
    w.sent = builder.take(ranks * channels * sizeof(uint32_t));
    w.taken = builder.take(ranks * channels * sizeof(uint32_t));
    w.slot_pitch = static_cast<uint64_t>(g.slot_pitch());
    w.slots = builder.take(ranks * channels * static_cast<uint64_t>(g.num_slots) * w.slot_pitch);
    w.segment_bytes = builder.total();
    return w;
  }
};

}  // namespace moe_ep::two_sided
