// How the records of a round are dealt out to the channels of CUDA. All ranks count with it, from
// what they agree about, so that only rows have to travel.
//
// A record is a token's rows of all fields, each padded to whole 16-byte chunks. It has parts,
// which fit a slot; a rank's tokens have blocks. An item is one part of the records of one block,
// and item i goes through channel i % num_channels.
//
// The geometry says how much memory a pair of ranks has, in FIFOs. A stream may join several of
// them to one channel with larger slots: every stream begins with all FIFOs empty, so the next one
// may cut the same memory in another way.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/limits.h"
#include "two_sided/geometry.h"

namespace moe_ep::two_sided {

// Where blocks can begin: `bound` of num_channels in front of this token.
MOE_EP_HOST_DEVICE constexpr int32_t token_at_bound(int32_t num_tokens, int32_t bound,
                                                    int32_t num_channels) {
  return static_cast<int32_t>(static_cast<int64_t>(num_tokens) * bound / num_channels);
}

// The first bound that is not in front of an earlier token.
MOE_EP_HOST_DEVICE constexpr int32_t first_bound_at(int32_t token, int32_t num_tokens,
                                                    int32_t num_bounds) {
  return static_cast<int32_t>((static_cast<int64_t>(token) * num_bounds + num_tokens - 1) /
                              num_tokens);
}

MOE_EP_HOST_DEVICE constexpr int64_t chunks_of(int64_t row_bytes) {
  return (row_bytes + static_cast<int64_t>(kRowAlignment) - 1) /
         static_cast<int64_t>(kRowAlignment);
}

struct Item {
  int32_t first_bound;  // its tokens lie between these, see token_at_bound
  int32_t end_bound;
  int32_t begin;   // chunks in front of it, of a record
  int32_t chunks;  // of a record

  MOE_EP_HOST_DEVICE constexpr int64_t bytes() const {
    return int64_t{chunks} * static_cast<int64_t>(kRowAlignment);
  }
};

struct StreamPlan {
  int32_t record_chunks;
  int32_t part_chunks;  // of all parts but the last
  int32_t num_parts;
  int32_t num_blocks;
  int32_t num_bounds;  // where blocks may begin, see token_at_bound
  int32_t num_channels;
  int32_t num_slots;  // of a channel
  int64_t slot_pitch;
  int32_t records_per_slot;

  // slot_bytes are at least one chunk; record_chunks is at least 1. joined: FIFOs of a channel.
  MOE_EP_HOST_DEVICE static constexpr StreamPlan of(const Geometry& g, int32_t joined,
                                                    int32_t record_chunks,
                                                    int32_t tokens_per_rank) {
    if (joined > g.num_channels) joined = 1;
    return of(g.num_channels, g.num_channels / joined, g.num_slots, joined * g.slot_bytes,
              joined * g.slot_pitch(), record_chunks, tokens_per_rank);
  }

  MOE_EP_HOST_DEVICE static constexpr StreamPlan of(int32_t num_bounds, int32_t num_channels,
                                                    int32_t num_slots, int64_t slot_bytes,
                                                    int64_t slot_pitch, int32_t record_chunks,
                                                    int32_t tokens_per_rank) {
    // A part is at least this long if it need not be shorter: what one load of a warp brings.
    constexpr int32_t kShortPart = 32;
    constexpr int32_t kLine = 8;  // chunks of a cache line
    const auto slot_chunks = static_cast<int32_t>(slot_bytes / static_cast<int64_t>(kRowAlignment));
    const int32_t fewest = divided(record_chunks, slot_chunks);
    // With fewer tokens than channels several channels share each record.
    const int32_t channels_per_token =
        tokens_per_rank > 0 ? num_channels / tokens_per_rank : num_channels;
    const int32_t most = divided(record_chunks, kShortPart);
    const int32_t wanted = channels_per_token < most ? channels_per_token : most;
    int32_t part = divided(record_chunks, wanted > fewest ? wanted : fewest);
    const int32_t whole_lines = divided(part, kLine) * kLine;
    if (whole_lines <= slot_chunks) part = whole_lines;
    if (part > record_chunks) part = record_chunks;
    StreamPlan plan{};
    plan.record_chunks = record_chunks;
    plan.part_chunks = part;
    plan.num_parts = divided(record_chunks, part);
    plan.num_blocks = plan.num_parts < num_channels ? num_channels / plan.num_parts : 1;
    plan.num_bounds = num_bounds;
    plan.num_channels = num_channels;
    plan.num_slots = num_slots;
    plan.slot_pitch = slot_pitch;
    plan.records_per_slot = slot_chunks / part;
    return plan;
  }

  MOE_EP_HOST_DEVICE constexpr int32_t num_items() const { return num_parts * num_blocks; }
  // Those that have something to do are the first ones.
  MOE_EP_HOST_DEVICE constexpr int32_t busy_channels() const {
    return num_items() < num_channels ? num_items() : num_channels;
  }
  MOE_EP_HOST_DEVICE constexpr Item item(int32_t index) const {
    const int32_t block = index / num_parts;
    const int32_t begin = (index - block * num_parts) * part_chunks;
    const int32_t left = record_chunks - begin;
    return {block * num_bounds / num_blocks, (block + 1) * num_bounds / num_blocks, begin,
            left < part_chunks ? left : part_chunks};
  }

 private:
  MOE_EP_HOST_DEVICE static constexpr int32_t divided(int32_t a, int32_t b) {
    return a / b + (a % b != 0 ? 1 : 0);  // rounded up
  }
};

// Of the slots of a FIFO, whose counts wrap at 2^32.
MOE_EP_HOST_DEVICE constexpr bool has_room(uint32_t head, uint32_t tail, int32_t num_slots) {
  return head - tail < static_cast<uint32_t>(num_slots);
}

// Who does what in a CTA of alltoallv and combine: of each channel one warp is at the tokens, and
// the others share the peers.
struct CtaShape {
  static constexpr int32_t kWarps = 8;

  int32_t peer_warps;  // of a channel
  int32_t channels;    // that it takes at a time

  // By counting, for four ranks: to load a record and store it for all peers takes a warp as long
  // as to bring home one of what the peers send.
  MOE_EP_HOST_DEVICE static constexpr CtaShape of_alltoallv(int32_t ep_size) {
    return ep_size <= 2 ? CtaShape{1, 4} : CtaShape{3, 2};
  }
  // And to add a token's rows as long as to send the experts' rows for one.
  MOE_EP_HOST_DEVICE static constexpr CtaShape of_combine() { return {1, 4}; }

  // FIFOs that alltoallv joins to a channel: its CTAs take so many times fewer channels.
  MOE_EP_HOST_DEVICE static constexpr int32_t joined_in_alltoallv(int32_t ep_size) {
    return of_combine().channels / of_alltoallv(ep_size).channels;
  }

  MOE_EP_HOST_DEVICE constexpr int32_t warps_per_channel() const { return 1 + peer_warps; }
  MOE_EP_HOST_DEVICE constexpr bool is_full() const {
    return warps_per_channel() * channels == kWarps;
  }
  MOE_EP_HOST_DEVICE constexpr int32_t groups(const StreamPlan& plan) const {
    return (plan.busy_channels() + channels - 1) / channels;
  }
};
static_assert(CtaShape::of_alltoallv(2).is_full() && CtaShape::of_alltoallv(8).is_full() &&
              CtaShape::of_combine().is_full());

// Which of the warps at the peers has this one. Peers are counted from the own rank on, so that not
// all ranks begin with the same.
MOE_EP_HOST_DEVICE constexpr int32_t warp_of_peer(int32_t peer, int32_t ep_rank, int32_t ep_size,
                                                  const CtaShape& shape) {
  const int32_t distance = peer > ep_rank ? peer - ep_rank : peer - ep_rank + ep_size;
  return (distance - 1) % shape.peer_warps;
}

}  // namespace moe_ep::two_sided
