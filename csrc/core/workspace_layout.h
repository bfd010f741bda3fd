// Where everything is in one rank's segment of the workspace. Host, device and Python read the same
// struct, so that sizes and offsets cannot disagree.
#pragma once

#include <cstdint>

#include "core/geometry.h"
#include "core/host_device.h"
#include "core/limits.h"
#include "core/rank_mask.h"
#include "core/status.h"

namespace moe_ep {

// First bytes of a segment: private to its rank, peers never touch it (except `sleepers`, which
// they read).
struct ControlBlock {
  uint64_t magic;  // kWorkspaceMagic once initialised
  // The workspace as this rank maps it: a clone of the tensor does not match.
  uint64_t self_address;
  uint64_t fingerprint;  // of the geometry it was initialised for
  uint32_t epoch;        // the last round begun; advanced by dispatch, read by combine
  Phase phase;           // kDispatch between dispatch and combine
  int32_t num_tokens;    // of the round in flight: what combine must be called with
  int32_t tokens_per_rank;
  // Threads of this rank asleep on a flag: a signaller makes the wake-up call only if there are
  // any.
  uint32_t sleepers;
  RankMask active;  // of the round in flight: combine must be called with the same
  TimeoutRecord timeout;
  InvalidIdRecord invalid_id;
};

inline constexpr uint64_t kWorkspaceMagic = 0x6d6f655f65703031u;  // "moe_ep01"

// What a source tells a destination about the round, one slot a source in the destination's
// segment. Written by the source before it signals `dispatched`, read by the destination after its
// wait; written again one round later at the earliest, which the wait of combine orders after the
// read.
struct RoundHeader {
  uint32_t dispatched;      // flag: epoch whose rows, ids, weights and header fields are in place
  int32_t num_rows;         // rows from this source in its block
  int32_t tokens_per_rank;  // must be the same on all ranks
  int32_t has_weights;      // likewise
  int32_t has_stats;        // likewise
  int32_t num_payloads;     // likewise
  int64_t row_bytes[kMaxPayloads];  // likewise
};

// What an owner tells a source, one slot an owner in the source's segment. Written by the owner
// before it signals `ready`, read by the source after its wait; written again in the owner's next
// combine, which comes after the source's next dispatch.
struct CombineFlag {
  uint32_t ready;       // flag: epoch whose expert outputs are in place at the owner
  int32_t row_type;     // of the expert outputs; must be the same on all ranks
  int64_t hidden_size;  // likewise
};

// Where a token's row lies on one of its ranks. Written by dispatch, read by combine of the same
// rank.
struct SendSlot {
  int32_t rank;  // ascending in a token's list; -1 ends it
  int32_t row;   // within this source's block there
};

struct Region {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

class LayoutBuilder {
 public:
  MOE_EP_HOST_DEVICE constexpr Region take(uint64_t bytes) {
    const Region region{next_, bytes};
    next_ = align_up(next_ + bytes);
    return region;
  }
  MOE_EP_HOST_DEVICE constexpr uint64_t total() const { return next_; }
  MOE_EP_HOST_DEVICE static constexpr uint64_t align_up(uint64_t bytes) {
    return (bytes + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
  }

 private:
  uint64_t next_ = 0;
};

struct WorkspaceLayout {
  Region control;        // ControlBlock
  Region round_headers;  // [ep_size] RoundHeader, kHeaderStride apart; slot s is written by rank s
  Region combine_flags;  // [ep_size] CombineFlag, kFlagAlignment apart; slot p is written by rank p
  Region send_slots;     // [max_tokens_per_rank, max_destinations] SendSlot; private
  Region eplb_stats;     // [ep_size, eplb_stats_num_experts] int32; row s is written by rank s
  Region topk_ids;  // [ep_size * max_tokens_per_rank, top_k] int32; block s is written by rank s
  Region topk_weights;  // the same in float32
  Region payloads;      // received rows, see PayloadPlacement; block s is written by rank s
  Region
      combine_rows;  // [ep_size * max_tokens_per_rank] expert outputs; private, read by the peers
  uint64_t segment_bytes = 0;

  static constexpr uint64_t kHeaderStride =
      (sizeof(RoundHeader) + kFlagAlignment - 1) / kFlagAlignment * kFlagAlignment;

  MOE_EP_HOST_DEVICE static constexpr WorkspaceLayout of(const Geometry& g) {
    const auto ranks = static_cast<uint64_t>(g.ep_size);
    const auto rows = static_cast<uint64_t>(g.max_rows());
    const auto top_k = static_cast<uint64_t>(g.top_k);
    LayoutBuilder builder;
    WorkspaceLayout w;
    w.control = builder.take(sizeof(ControlBlock));
    w.round_headers = builder.take(ranks * kHeaderStride);
    w.combine_flags = builder.take(ranks * kFlagAlignment);
    w.send_slots = builder.take(static_cast<uint64_t>(g.max_tokens_per_rank) *
                                static_cast<uint64_t>(g.max_destinations()) * sizeof(SendSlot));
    w.eplb_stats =
        builder.take(ranks * static_cast<uint64_t>(g.eplb_stats_num_experts) * sizeof(int32_t));
    w.topk_ids = builder.take(rows * top_k * sizeof(int32_t));
    w.topk_weights = builder.take(rows * top_k * sizeof(float));
    // One alignment step a payload: PayloadPlacement starts each of them on a boundary.
    w.payloads = builder.take(rows * static_cast<uint64_t>(g.dispatch_bytes_per_token) +
                              kMaxPayloads * kRegionAlignment);
    w.combine_rows = builder.take(rows * static_cast<uint64_t>(g.combine_bytes_per_token));
    w.segment_bytes = builder.total();
    return w;
  }
};

// Where the payloads of one round lie inside the payload region: one after the other, each of them
// dense and rank-major, `[ep_size * tokens_per_rank, row_bytes[i]]`.
struct PayloadPlacement {
  uint64_t offset[kMaxPayloads] = {};  // from the start of the segment
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
      next = LayoutBuilder::align_up(next + rows * static_cast<uint64_t>(row_bytes[i]));
    }
    return placement;
  }
};

}  // namespace moe_ep
