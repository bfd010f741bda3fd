// Which way a step goes: one table. Whether as packets, in dispatch and in combine, follows from
// sizes that all ranks share, so that all go the same way. Rows in place look the same to their
// receiver, whether they come directly or in bulk: headers and arrivals are the same, and each rank
// chooses for itself.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/geometry.h"
#include "core/limits.h"

namespace moe_ep::one_sided {

// The switch points below were measured on one H200 with rows of 14336 bytes, round by round.

// Tokens a rank that travel as packets: flags in the data beat rows in place with a flag behind
// them by 22 to 32 % up to 32 tokens at EP2 and EP4, by 10 % for 8 tokens at EP8; 16 tokens at EP8
// are 12 % faster in place.
constexpr int32_t low_latency_tokens(int32_t ep_size, int32_t top_k, int32_t max_tokens_per_rank) {
  constexpr int32_t kMaxRows = 64;  // of a source with many destinations
  const int32_t destinations = std::min(ep_size, top_k);
  const int32_t tokens = destinations <= 4 ? kMaxPacketTokens : kMaxRows / destinations;
  return std::min(max_tokens_per_rank, tokens);
}

enum class DispatchPath { kPackets, kDirectRows, kBulkRows };

// Up to so many tokens are stored in place from registers (10 to 50 % faster at 128 tokens); more
// go through shared memory, so that the copy engine keeps more bytes in flight than registers can
// hold.
inline constexpr int32_t kMaxDirectDispatchTokens = 128;
inline constexpr int32_t kMaxDirectDispatchRanks = 32;  // lane r of a warp stands for rank r

// rows_are_aligned: those of all payloads, to kRowAlignment.
constexpr DispatchPath dispatch_path(const Geometry& g, int32_t tokens_per_rank,
                                     bool rows_are_aligned) {
  // Without a token either way would do, but only one has packets to put statistics in.
  if (g.low_latency_tokens > 0 && tokens_per_rank <= g.low_latency_tokens)
    return DispatchPath::kPackets;
  const bool is_direct = tokens_per_rank <= kMaxDirectDispatchTokens &&
                         g.ep_size <= kMaxDirectDispatchRanks && rows_are_aligned;
  return is_direct ? DispatchPath::kDirectRows : DispatchPath::kBulkRows;
}

enum class CombinePath { kPush, kDirect, kBulkRows };

// So many tokens a rank, at most, get their rows pushed by the owners, as packets. A pull costs an
// ordered flag and then a read over the link; a push has a third more bytes to move. Two ranks on
// two H200: pushing was 2 to 8 % faster up to 8 tokens. Where ranks share GPUs pulling was faster
// at any size, by 2 to 15 %: on one GPU there is no link, and of four or eight ranks on two GPUs
// the packets of all wait for the same multiprocessors. For more ranks, each with a GPU: to be
// measured.
constexpr int32_t push_tokens(const Geometry& g) {
  constexpr int32_t kMaxDestinations = 2;
  return g.spans_gpus != 0 && g.max_destinations() <= kMaxDestinations ? g.push_slots() : 0;
}

// Few rows are summed from registers, with all loads of a piece in flight: 18 % faster at 128
// tokens and EP2, 2 % slower at EP8. Many go through shared memory, as in dispatch.
inline constexpr int32_t kMaxDirectTokens = 128;
inline constexpr int64_t kMaxDirectRows = 512;

constexpr CombinePath combine_path(const Geometry& g, int32_t tokens_per_rank) {
  if (push_tokens(g) > 0 && tokens_per_rank <= push_tokens(g)) return CombinePath::kPush;
  const bool is_direct = tokens_per_rank <= kMaxDirectTokens &&
                         int64_t{tokens_per_rank} * g.max_destinations() <= kMaxDirectRows;
  return is_direct ? CombinePath::kDirect : CombinePath::kBulkRows;
}

namespace path_checks {

// Exactly the steps up to push_tokens are pushed, and there are slots for their rows.
constexpr bool pushes(int32_t ep_size, int32_t low_latency_tokens, int64_t row_bytes) {
  const Geometry g{ep_size, 256, 8, 64, row_bytes, row_bytes, 0, low_latency_tokens, 1};
  const int32_t most = push_tokens(g);
  if (most > low_latency_tokens || combine_path(g, most + 1) == CombinePath::kPush) return false;
  return most > 0 && combine_path(g, most) == CombinePath::kPush &&
         combine_path(g, 0) == CombinePath::kPush;
}

static_assert(pushes(2, 32, 14336) && pushes(2, 4, 2) && pushes(2, 1, 1));
static_assert(!pushes(4, 32, 14336) && !pushes(2, 0, 14336) && !pushes(2, 8, int64_t{1} << 21));

}  // namespace path_checks

}  // namespace moe_ep::one_sided
