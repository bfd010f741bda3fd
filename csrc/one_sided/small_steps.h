// Which steps are small: up to which sizes they go as packets, or directly. What is sent as packets
// must be received as packets: that follows from sizes that all ranks share. Rows in place look the
// same to their receiver, however they came: there each rank chooses for itself.
//
// The sizes below were measured on one H200 with rows of 14336 bytes, round by round.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/geometry.h"
#include "core/limits.h"

namespace moe_ep::one_sided {

// Tokens a rank that travel as packets: flags in the data beat rows in place with a flag behind
// them by 22 to 32 % up to 32 tokens at EP2 and EP4, by 10 % for 8 tokens at EP8; 16 tokens at EP8
// are 12 % faster in place.
constexpr int32_t low_latency_tokens(int32_t ep_size, int32_t top_k, int32_t max_tokens_per_rank) {
  constexpr int32_t kMaxRows = 64;  // of a source with many destinations
  const int32_t destinations = std::min(ep_size, top_k);
  const int32_t tokens = destinations <= 4 ? kMaxPacketTokens : kMaxRows / destinations;
  return std::min(max_tokens_per_rank, tokens);
}

// Without a token either way would do, but only packets have room for statistics.
constexpr bool goes_as_packets(const Geometry& g, int32_t tokens_per_rank) {
  return g.low_latency_tokens > 0 && tokens_per_rank <= g.low_latency_tokens;
}

// Up to so many tokens are stored in place from registers (10 to 50 % faster at 128 tokens than in
// bulk, which keeps more bytes in flight than registers can hold).
inline constexpr int32_t kMaxDirectDispatchTokens = 128;
inline constexpr int32_t kMaxDirectDispatchRanks = 32;  // lane r of a warp stands for rank r

// rows_are_aligned: those of all payloads, to kRowAlignment.
constexpr bool is_dispatched_directly(const Geometry& g, int32_t tokens_per_rank,
                                      bool rows_are_aligned) {
  return tokens_per_rank <= kMaxDirectDispatchTokens && g.ep_size <= kMaxDirectDispatchRanks &&
         rows_are_aligned;
}

// So many tokens a rank, at most, get their rows pushed by the owners, as packets. A pull costs an
// ordered flag and then a read over the link; a push has a third more bytes to move. Two ranks on
// two H200: pushing was 2 to 8 % faster up to 8 tokens. Where ranks share GPUs pulling was faster
// at any size, by 2 to 15 %: on one GPU there is no link, and of four or eight ranks on two GPUs
// the packets of all wait for the same multiprocessors. For more ranks, each with a GPU: to be
// measured.
constexpr int32_t push_tokens(const Geometry& g) {
  constexpr int32_t kMaxDestinations = 2;
  const bool is_faster = g.spans_gpus != 0 && g.max_destinations() <= kMaxDestinations;
  return is_faster || g.prefers_packets != 0 ? g.push_slots() : 0;
}

constexpr bool is_pushed(const Geometry& g, int32_t tokens_per_rank) {
  return push_tokens(g) > 0 && tokens_per_rank <= push_tokens(g);
}

// Few rows are summed from registers, with all loads of a piece in flight: 18 % faster at 128
// tokens and EP2 than in bulk, 2 % slower at EP8.
inline constexpr int32_t kMaxDirectTokens = 128;
inline constexpr int64_t kMaxDirectRows = 512;

constexpr bool is_summed_directly(const Geometry& g, int32_t tokens_per_rank) {
  return tokens_per_rank <= kMaxDirectTokens &&
         int64_t{tokens_per_rank} * g.max_destinations() <= kMaxDirectRows;
}

namespace small_step_checks {

// Exactly the steps up to push_tokens are pushed, and there are slots for their rows.
constexpr int32_t pushed(Geometry g) {
  const int32_t most = push_tokens(g);
  if (most > g.low_latency_tokens || is_pushed(g, most + 1)) return -1;
  return most == 0 || (is_pushed(g, most) && is_pushed(g, 0)) ? most : -1;
}
constexpr Geometry of(int32_t ep_size, int32_t low_latency_tokens, int64_t row_bytes,
                      int32_t prefers_packets) {
  return {ep_size,
          256,
          8,
          64,
          row_bytes,
          row_bytes,
          0,
          low_latency_tokens,
          /*spans_gpus=*/1,
          prefers_packets,
          /*max_top_k=*/8,
          /*has_rank_masks=*/1};
}

static_assert(pushed(of(2, 32, 14336, 0)) == 8 && pushed(of(2, 4, 2, 0)) == 4);
static_assert(pushed(of(4, 32, 14336, 0)) == 0 && pushed(of(2, 0, 14336, 0)) == 0);
static_assert(pushed(of(2, 8, int64_t{1} << 21, 0)) == 0);
static_assert(pushed(of(8, 32, 14336, 1)) == 32 && pushed(of(8, 0, 14336, 1)) == 0);

}  // namespace small_step_checks

}  // namespace moe_ep::one_sided
