// The numbers that size a two-sided workspace, and those of the layer that plays in it. They are
// the same on every rank of a group.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "core/fingerprint.h"
#include "core/geometry_check.h"
#include "core/host_device.h"
#include "core/limits.h"

namespace moe_ep::two_sided {

struct Geometry {
  int32_t ep_size;
  int32_t num_experts;
  int32_t top_k;
  int32_t max_tokens_per_rank;  // sizes nothing
  int32_t num_slots;            // of each FIFO; a power of two, see Segment::slot
  int64_t slot_bytes;
  int32_t num_channels;  // FIFOs of each pair and direction, see channels.h; the CPU has one
  int32_t spans_gpus;    // 1: ranks may be on several GPUs. 0: they share one

  // A token has at most one row on a rank, and at most one rank for each of its picks.
  MOE_EP_HOST_DEVICE constexpr int32_t max_destinations() const {
    return ep_size < top_k ? ep_size : top_k;
  }
  // From one slot to the next: each begins on a cache line.
  MOE_EP_HOST_DEVICE constexpr int64_t slot_pitch() const {
    constexpr auto kLine = static_cast<int64_t>(kRegionAlignment);
    return (slot_bytes + kLine - 1) / kLine * kLine;
  }
  // Tells workspaces of different layout apart, also from those of other transports: the numbers of
  // experts, picks and tokens are a layer's alone.
  MOE_EP_HOST_DEVICE constexpr uint64_t fingerprint() const {
    constexpr uint64_t kTwoSided = 2;
    const uint64_t fields[] = {kTwoSided,
                               static_cast<uint64_t>(ep_size),
                               static_cast<uint64_t>(num_slots),
                               static_cast<uint64_t>(slot_bytes),
                               static_cast<uint64_t>(num_channels),
                               static_cast<uint64_t>(spans_gpus)};
    return fingerprint_of(fields);
  }
};

inline constexpr int64_t kMaxSlots = 1 << 16;
inline constexpr int64_t kMaxSlotBytes = 1 << 30;
inline constexpr int64_t kMaxChannels = 1 << 10;

// Throws std::invalid_argument that names the field, the limit and the value.
inline Geometry valid_geometry(int64_t ep_size, int64_t num_experts, int64_t top_k,
                               int64_t max_tokens_per_rank, int64_t num_slots, int64_t slot_bytes,
                               int64_t num_channels, int64_t spans_gpus) {
  constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
  const auto in_range = [](const char* name, int64_t value, int64_t low, int64_t high) {
    return static_cast<int32_t>(require_in_range(name, value, low, high));
  };
  Geometry g{};
  g.ep_size = in_range("ep_size", ep_size, 1, kMaxEpSize);
  g.num_experts = in_range("num_experts", num_experts, 1, kInt32Max);
  g.top_k = in_range("top_k", top_k, 1, kMaxTopK);
  g.max_tokens_per_rank = in_range("max_tokens_per_rank", max_tokens_per_rank, 1, kInt32Max);
  g.num_slots = in_range("num_slots", num_slots, 1, kMaxSlots);
  g.slot_bytes = require_in_range("slot_bytes", slot_bytes, 1, kMaxSlotBytes);
  if (!std::has_single_bit(static_cast<uint32_t>(g.num_slots))) {
    throw std::invalid_argument("num_slots must be a power of two, got " +
                                std::to_string(num_slots));
  }
  g.num_channels = in_range("num_channels", num_channels, 1, kMaxChannels);
  g.spans_gpus = in_range("spans_gpus", spans_gpus, 0, 1);
  const int64_t slots = int64_t{g.ep_size} * g.num_channels * g.num_slots;
  if (g.slot_bytes > kMaxSegmentBytes / slots) {
    throw std::invalid_argument("num_slots * slot_bytes * num_channels must be at most " +
                                std::to_string(kMaxSegmentBytes / g.ep_size) + " for " +
                                std::to_string(g.ep_size) + " ranks");
  }
  return g;
}

}  // namespace moe_ep::two_sided
