// Where everything is in one rank's segment of the workspace. Host, device and Python read the same
// struct, so that sizes and offsets cannot disagree.
#pragma once

#include <cstdint>

#include "core/geometry.h"
#include "core/host_device.h"
#include "core/limits.h"
#include "core/process_identity.h"
#include "core/rank_mask.h"
#include "core/status.h"

namespace moe_ep {

// First bytes of a segment: private to its rank, peers never touch it. (They read how the rank is
// doing: `has_left`, and on the CPU `sleepers`, `active`, `is_sending`, `timeout` and `process`.)
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
  // CPU: 1 while this rank is in a dispatch, and may write to those in `active`.
  uint32_t is_sending;
  // Not 0 once this rank's communication was destroyed: it takes part in no further round.
  uint32_t has_left;
  TimeoutRecord timeout;
  InvalidIdRecord invalid_id;
  ProcessIdentity process;  // the rank's; on the CPU
};

inline constexpr uint64_t kWorkspaceMagic = 0x6d6f655f65703031u;  // "moe_ep01"

// What a source tells a destination about the round, one slot a source in the destination's
// segment. Written by the source before it signals `dispatched`, read by the destination after its
// wait; written again one round later at the earliest, which the wait of combine orders after the
// read.
//
// On CUDA the first 16 bytes are one packet, stored and read whole; rows in bulk are published by
// `dispatch_arrivals` instead. The other fields are there only once `detailed` has the epoch: a
// rank writes them when it sees a signature that is not its own.
struct alignas(16) RoundHeader {
  int32_t num_rows;         // rows from this source in its block
  int32_t tokens_per_rank;  // must be the same on all ranks
  // Hash of what must be the same on all ranks: on CUDA all of it, on the CPU the rank mask.
  uint32_t signature;
  uint32_t dispatched;   // flag: epoch whose rows, ids, weights and header fields are in place
  int16_t has_weights;   // must be the same on all ranks
  int16_t has_stats;     // likewise
  int16_t num_payloads;  // likewise
  int16_t top_k;         // likewise: layers that share a workspace differ in it
  int32_t num_experts;   // likewise
  uint32_t detailed;     // CUDA: flag: epoch whose fields below `dispatched` are in place
  int64_t row_bytes[kMaxPayloads];  // must be the same on all ranks
};
static_assert(sizeof(RoundHeader) == 64 && alignof(RoundHeader) == 16);

// What an owner tells a source, one slot an owner in the source's segment. Written by the owner
// before it signals `ready`, read by the source after its wait; written again in the owner's next
// combine, which comes after the source's next dispatch.
//
// On CUDA the first 8 bytes are stored and read as one word.
struct alignas(8) CombineFlag {
  uint32_t ready;         // flag: epoch whose expert outputs are in place at the owner
  uint32_t signature;     // CUDA: hash of the fields below, in their place
  int32_t row_type;       // of the expert outputs; must be the same on all ranks
  int32_t low_precision;  // whether they travel as scaled FP8; likewise
  int64_t hidden_size;    // likewise
};

// Where a token's row lies on one of its ranks. Written by dispatch, read by combine of the same
// rank.
struct SendSlot {
  int32_t rank;  // ascending in a token's list; -1 ends it
  int32_t row;   // within this source's block there
};

// The counters of a rank's kernels. No grid reads a word that it writes itself, so that the CTAs of
// a grid need not run together: dispatch reads the line that combine writes, and the reverse.
// Counters of work are taken by one kernel and reset by the other. Private to its rank, but for
// what peers read when something is wrong: `combine_epoch` and `active` in a long wait, `rows_read`
// and `left_reading` when a mask loses ranks.
struct DeviceState {
  alignas(kRegionAlignment) uint32_t dispatch_epoch;  // of the last round whose combine has run
  RankMask last_active;                               // of that round
  // Written by dispatch, read by combine.
  alignas(kRegionAlignment) uint32_t combine_epoch;  // of the round in flight
  uint32_t poisoned_epoch;  // of a round in which the ranks disagreed: its sums are NaN
  int32_t num_tokens;       // of the round in flight: what combine must be called with
  int32_t tokens_per_rank;
  RankMask active;
  // Set when a wait has expired, and never reset: every later kernel gives up at once.
  alignas(kRegionAlignment) uint32_t failed;
  uint32_t invalid_id_lock;
  alignas(kRegionAlignment) uint32_t dispatch_items;
  alignas(kRegionAlignment) uint32_t combine_items;
  alignas(kRegionAlignment) uint32_t stage_items;
  alignas(kRegionAlignment) uint32_t staged_items;  // those that are done
  // Each combine adds kArrivalsPerRound, every CTA its part once it has read its peers' rows: the
  // word is that many times the epoch of the last round whose rows have been read.
  alignas(kRegionAlignment) uint32_t rows_read;
  // Ranks that this one went on without while they were reading its rows, since the beginning.
  alignas(kRegionAlignment) RankMask left_reading;
};

struct Region {
  uint64_t offset = 0;  // of its first byte in a segment
};

class LayoutBuilder {
 public:
  MOE_EP_HOST_DEVICE constexpr Region take(uint64_t bytes) {
    const Region region{next_};
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

// Bytes from one row of the workspace to the next.
MOE_EP_HOST_DEVICE constexpr uint64_t row_pitch(int64_t row_bytes) {
  return (static_cast<uint64_t>(row_bytes) + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

// The same for rows that travel in low precision: whole cache lines, since a link between GPUs
// moves lines, and rows that share one cost it packets.
MOE_EP_HOST_DEVICE constexpr uint64_t row_pitch_in_lines(int64_t row_bytes) {
  return LayoutBuilder::align_up(static_cast<uint64_t>(row_bytes));
}

// The most that the pitches of a token's payload rows can sum to.
MOE_EP_HOST_DEVICE constexpr uint64_t max_payload_pitch(const Geometry& g) {
  return row_pitch(g.dispatch_bytes_per_token) + (kMaxPayloads - 1) * kRowAlignment;
}

// Small steps travel as packets: 16 bytes of which 12 are data and 4 the epoch, stored and read
// whole, so that a packet that has arrived says so itself. Every 16-byte unit of a packet region
// only ever holds packets: no data can look like an epoch. Packets are compared with ==, since a
// slot keeps packets of old rounds; one that was not written for exactly 2^32 rounds would be
// taken for new.
//
// A record is a token's rows, ids and weights as chunks of 16 bytes, each part padded to whole
// chunks; in combine it is one row. Three chunks make four packets, and one thread's work: of Q
// threads, thread q has the chunks q, q + Q, q + 2Q and the packets q, q + Q, q + 2Q, q + 3Q, so
// that both are coalesced.
struct PacketSlots {
  static constexpr uint64_t kChunksPerThread = 3;
  static constexpr uint64_t kPacketsPerThread = 4;
  static constexpr uint64_t kPacketBytes = 16;

  MOE_EP_HOST_DEVICE static constexpr uint64_t threads(uint64_t chunks) {
    return (chunks + kChunksPerThread - 1) / kChunksPerThread;
  }
  MOE_EP_HOST_DEVICE static constexpr uint64_t bytes(uint64_t chunks) {
    return threads(chunks) * kPacketsPerThread * kPacketBytes;
  }
  // Bytes of one slot.
  MOE_EP_HOST_DEVICE static constexpr uint64_t of_dispatch(const Geometry& g) {
    return bytes(max_payload_pitch(g) / kRowAlignment +
                 2 * chunks_of_words(static_cast<uint64_t>(g.max_top_k)));
  }
  MOE_EP_HOST_DEVICE static constexpr uint64_t of_combine(const Geometry& g) {
    return bytes(row_pitch(g.combine_bytes_per_token) / kRowAlignment);
  }
  MOE_EP_HOST_DEVICE static constexpr uint64_t of_stats(const Geometry& g) {
    return bytes(chunks_of_words(static_cast<uint64_t>(g.eplb_stats_num_experts)));
  }
  MOE_EP_HOST_DEVICE static constexpr uint64_t chunks_of_words(uint64_t words) {
    return (words * sizeof(uint32_t) + kRowAlignment - 1) / kRowAlignment;
  }
};

struct WorkspaceLayout {
  Region control;        // ControlBlock
  Region round_headers;  // [ep_size] RoundHeader, kHeaderStride apart; slot s is written by rank s
  Region combine_flags;  // [ep_size] CombineFlag, kFlagAlignment apart; slot p is written by rank p
  Region device_state;   // DeviceState
  // [ep_size] uint32, kFlagAlignment apart. Each dispatch of rank s adds kArrivalsPerRound to word
  // s, every CTA its part once its rows are in place: the word is that many times the epoch.
  Region dispatch_arrivals;
  Region recv_counts;  // [ep_size] int32, rows from each source; private
  Region send_slots;   // [max_tokens_per_rank, max_destinations] SendSlot; private
  Region eplb_stats;   // [ep_size, eplb_stats_num_experts] int32; row s is written by rank s
  Region topk_ids;     // [ep_size * max_tokens_per_rank, top_k] int32; block s is written by rank s
  Region topk_weights;  // the same in float32
  Region payloads;      // received rows, see PayloadPlacement; block s is written by rank s
  // [ep_size * max_tokens_per_rank] expert outputs, row_pitch apart; private, read by the peers. On
  // CUDA, rows that travel as FP8 are in their source's memory instead, row_pitch_in_lines apart:
  // block p is written by rank p.
  Region combine_rows;
  // [ep_size * max_tokens_per_rank, kMaxRowParts] uint32: the epoch of what was pushed to these
  // rows. Only epochs are ever written here, and compared with ==, as those of packets.
  Region row_flags;
  // Small steps on CUDA, see PacketSlots: [ep_size, low_latency_tokens] slots, block r written by
  // rank r.
  Region dispatch_packets;
  Region stats_packets;  // [ep_size] slots
  // [ep_size, push_slots] slots; row i of block p is p's row for our i-th there.
  Region combine_packets;
  uint64_t segment_bytes = 0;

  // What `initialize` zeroes begins at 0 and ends here; behind it only row_flags and what follows
  // need zeros, on CUDA.
  MOE_EP_HOST_DEVICE constexpr uint64_t end_of_control() const { return send_slots.offset; }

  // Room for rows of either precision.
  MOE_EP_HOST_DEVICE static constexpr uint64_t combine_rows_bytes(const Geometry& g) {
    return static_cast<uint64_t>(g.max_rows()) * row_pitch_in_lines(g.combine_bytes_per_token);
  }

  static constexpr uint64_t kHeaderStride =
      (sizeof(RoundHeader) + kFlagAlignment - 1) / kFlagAlignment * kFlagAlignment;

  MOE_EP_HOST_DEVICE static constexpr WorkspaceLayout of(const Geometry& g) {
    const auto ranks = static_cast<uint64_t>(g.ep_size);
    const auto rows = static_cast<uint64_t>(g.max_rows());
    const auto top_k = static_cast<uint64_t>(g.max_top_k);
    LayoutBuilder builder;
    WorkspaceLayout w;
    w.control = builder.take(sizeof(ControlBlock));
    w.round_headers = builder.take(ranks * kHeaderStride);
    w.combine_flags = builder.take(ranks * kFlagAlignment);
    w.device_state = builder.take(sizeof(DeviceState));
    w.dispatch_arrivals = builder.take(ranks * kFlagAlignment);
    w.recv_counts = builder.take(ranks * sizeof(int32_t));
    w.send_slots = builder.take(static_cast<uint64_t>(g.max_tokens_per_rank) *
                                static_cast<uint64_t>(g.max_destinations()) * sizeof(SendSlot));
    w.eplb_stats =
        builder.take(ranks * static_cast<uint64_t>(g.eplb_stats_num_experts) * sizeof(int32_t));
    w.topk_ids = builder.take(rows * top_k * sizeof(int32_t));
    w.topk_weights = builder.take(rows * top_k * sizeof(float));
    // One alignment step a payload and row, and one a payload: see PayloadPlacement.
    w.payloads = builder.take(rows * max_payload_pitch(g) + kMaxPayloads * kRegionAlignment);
    w.combine_rows = builder.take(combine_rows_bytes(g));
    w.row_flags = builder.take(rows * kMaxRowParts * sizeof(uint32_t));
    const auto slots = ranks * static_cast<uint64_t>(g.low_latency_tokens);
    w.dispatch_packets = builder.take(slots * PacketSlots::of_dispatch(g));
    w.stats_packets = builder.take(g.low_latency_tokens > 0 ? ranks * PacketSlots::of_stats(g) : 0);
    w.combine_packets =
        builder.take(ranks * static_cast<uint64_t>(g.push_slots()) * PacketSlots::of_combine(g));
    w.segment_bytes = builder.total();
    return w;
  }
};

}  // namespace moe_ep
