// Which geometries there are. Python, the ops and the native tests ask this before they size
// anything.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "core/geometry.h"
#include "core/limits.h"

namespace moe_ep {

inline int64_t require_in_range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return value;
  throw std::invalid_argument(std::string(name) + " must be in [" + std::to_string(low) + ", " +
                              std::to_string(high) + "], got " + std::to_string(value));
}

inline int32_t require_top_k(int64_t top_k, int32_t num_experts) {
  require_in_range("top_k", top_k, 1, kMaxTopK);
  if (top_k > num_experts) {
    throw std::invalid_argument("top_k must not exceed num_experts=" + std::to_string(num_experts) +
                                ", got " + std::to_string(top_k));
  }
  return static_cast<int32_t>(top_k);
}

// Throws std::invalid_argument that names the field, the limit and the value.
// max_top_k: 0 for top_k.
inline Geometry valid_geometry(int64_t ep_size, int64_t num_experts, int64_t top_k,
                               int64_t max_tokens_per_rank, int64_t dispatch_bytes_per_token,
                               int64_t combine_bytes_per_token, int64_t eplb_stats_num_experts,
                               int64_t low_latency_tokens, int64_t spans_gpus,
                               int64_t prefers_packets, int64_t max_top_k, int64_t has_rank_masks) {
  constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
  const auto in_range = [](const char* name, int64_t value, int64_t low, int64_t high) {
    return static_cast<int32_t>(require_in_range(name, value, low, high));
  };
  Geometry g{};
  g.ep_size = in_range("ep_size", ep_size, 1, kMaxEpSize);
  g.num_experts = in_range("num_experts", num_experts, 1, kInt32Max);
  g.top_k = require_top_k(top_k, g.num_experts);
  g.max_tokens_per_rank = in_range("max_tokens_per_rank", max_tokens_per_rank, 1, kInt32Max);
  g.dispatch_bytes_per_token =
      require_in_range("dispatch_bytes_per_token", dispatch_bytes_per_token, 1, kMaxSegmentBytes);
  g.combine_bytes_per_token =
      require_in_range("combine_bytes_per_token", combine_bytes_per_token, 1, kMaxSegmentBytes);
  g.eplb_stats_num_experts =
      in_range("eplb_stats_num_experts", eplb_stats_num_experts, 0, g.num_experts);
  g.low_latency_tokens = in_range("low_latency_tokens", low_latency_tokens, 0,
                                  std::min(g.max_tokens_per_rank, kMaxPacketTokens));
  g.spans_gpus = in_range("spans_gpus", spans_gpus, 0, 1);
  g.prefers_packets = in_range("prefers_packets", prefers_packets, 0, 1);
  g.max_top_k = max_top_k == 0 ? g.top_k : in_range("max_top_k", max_top_k, g.top_k, kMaxTopK);
  g.has_rank_masks = in_range("has_rank_masks", has_rank_masks, 0, 1);
  // Divided, not multiplied: the products of the layout are known to fit 64 bits only after this.
  const int64_t bytes_per_row = g.dispatch_bytes_per_token + g.combine_bytes_per_token +
                                g.max_top_k * static_cast<int64_t>(sizeof(int32_t) + sizeof(float));
  if (g.max_rows() > kMaxSegmentBytes / bytes_per_row) {
    throw std::invalid_argument(
        "ep_size * max_tokens_per_rank * bytes of a token must be at most " +
        std::to_string(kMaxSegmentBytes) + " bytes per rank, got " + std::to_string(g.ep_size) +
        " * " + std::to_string(g.max_tokens_per_rank) + " * " + std::to_string(bytes_per_row));
  }
  return g;
}

}  // namespace moe_ep
