// Which way a step goes: one table, from sizes that all ranks share, so that all go the same way.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/geometry.h"

namespace moe_ep::cake {

// Rows that a rank may receive from one source as packets. Measured on one H200 and on two: up to
// 64 rows a source and all its destinations, flags in the data beat rows in place with a flag
// behind them.
inline constexpr int32_t kMaxPacketRows = 64;

constexpr int32_t low_latency_tokens(int32_t ep_size, int32_t top_k, int32_t max_tokens_per_rank) {
  return std::min(max_tokens_per_rank, std::min(32, kMaxPacketRows / std::min(ep_size, top_k)));
}

enum class DispatchPath { kPackets, kBulkRows };

constexpr DispatchPath dispatch_path(const Geometry& g, int32_t tokens_per_rank) {
  return tokens_per_rank <= g.low_latency_tokens ? DispatchPath::kPackets : DispatchPath::kBulkRows;
}

enum class CombinePath { kDirect, kBulkRows };

// Few tokens are summed from registers, with all loads of a piece in flight; many go through
// shared memory, so that the copy engine keeps more bytes in flight than registers can hold.
inline constexpr int32_t kMaxDirectTokens = 64;

constexpr CombinePath combine_path(int32_t tokens_per_rank) {
  return tokens_per_rank <= kMaxDirectTokens ? CombinePath::kDirect : CombinePath::kBulkRows;
}

}  // namespace moe_ep::cake
