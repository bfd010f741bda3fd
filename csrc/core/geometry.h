// The numbers that size a workspace, and those of the layer that plays in it. They are the same on
// every rank of a group.
#pragma once

#include <cstdint>

#include "core/fingerprint.h"
#include "core/host_device.h"
#include "core/limits.h"

namespace moe_ep {

struct Geometry {
  int32_t ep_size;
  int32_t num_experts;
  int32_t top_k;
  int32_t max_tokens_per_rank;
  int64_t dispatch_bytes_per_token;  // all payload rows of one token together
  int64_t combine_bytes_per_token;   // one expert output row, as it travels
  int32_t eplb_stats_num_experts;    // 0: no statistics travel
  int32_t low_latency_tokens;        // per rank; up to so many travel as packets. 0: never
  int32_t spans_gpus;                // 1: ranks may be on several GPUs. 0: they share one
  // 1: those tokens come back as packets, too. 0: only where that was measured to be faster.
  int32_t prefers_packets;
  int32_t max_top_k;  // of the layers that take turns in the workspace; the others have room, too
  int32_t has_rank_masks;  // 1: rounds may go on without some ranks. 0: all take part in all

  // Per rank; there is room for so many that come back as packets.
  MOE_EP_HOST_DEVICE constexpr int32_t push_slots() const {
    if (combine_bytes_per_token > kMaxPushedRowBytes) return 0;
    if (prefers_packets != 0) return low_latency_tokens;
    return low_latency_tokens < kMaxPushTokens ? low_latency_tokens : kMaxPushTokens;
  }
  // A token has at most one row on a rank, and at most one rank for each of its picks.
  MOE_EP_HOST_DEVICE constexpr int32_t max_destinations() const {
    return ep_size < max_top_k ? ep_size : max_top_k;
  }
  MOE_EP_HOST_DEVICE constexpr int64_t max_rows() const {
    return static_cast<int64_t>(ep_size) * max_tokens_per_rank;
  }
  // Tells workspaces of different layout apart: num_experts and top_k are a layer's alone.
  MOE_EP_HOST_DEVICE constexpr uint64_t fingerprint() const {
    const uint64_t fields[] = {static_cast<uint64_t>(ep_size),
                               static_cast<uint64_t>(max_top_k),
                               static_cast<uint64_t>(max_tokens_per_rank),
                               static_cast<uint64_t>(dispatch_bytes_per_token),
                               static_cast<uint64_t>(combine_bytes_per_token),
                               static_cast<uint64_t>(eplb_stats_num_experts),
                               static_cast<uint64_t>(low_latency_tokens),
                               static_cast<uint64_t>(spans_gpus),
                               static_cast<uint64_t>(prefers_packets),
                               static_cast<uint64_t>(has_rank_masks)};
    return fingerprint_of(fields);
  }
};

}  // namespace moe_ep
