// What the warps of a packet dispatch share: its parameters, and where the tokens go.
#pragma once

#include <cstdint>

#include "cake/cuda_params.h"
#include "cake/device/destinations.cuh"
#include "cake/device/memory_access.cuh"
#include "cake/device/record.cuh"
#include "cake/device/routing.cuh"
#include "core/fast_divide.h"

namespace moe_ep::cake {

// A rank has at most so many tokens: lane t stands for token t.
inline constexpr int32_t kMaxPacketTokens = 32;

struct PacketDispatchParams {
  DispatchKernelParams dispatch;
  RecordParts parts;
  RecordShape record;
  RecordShape stats;  // no pieces: no statistics travel
  FastDivider by_record_pieces;
  FastDivider by_stats_pieces;
  FastDivider by_tokens_per_rank;
};

// Where the tokens of this rank go.
template <int kWords>
struct Routes {
  RankSet<kWords> of_token;    // lane t: the ranks of token t
  uint32_t tokens_to[kWords];  // lane r: the tokens that go to rank 32 * w + r, a bit each

  // Of lane t's token, ranks 32 * w and up.
  __device__ uint32_t ranks_of_token(int w) const { return word(of_token.words, w); }
  // Lane r: how many tokens before this one go to rank 32 * w + r.
  __device__ int32_t row_of(int w, int32_t token) const {
    return __popc(word(tokens_to, w) & bits_below(token));
  }

 private:
  // Without an index at run time, which would move the words out of registers.
  __device__ static uint32_t word(const uint32_t (&words)[kWords], int w) {
    uint32_t result = words[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) result = i == w ? words[i] : result;
    return result;
  }
};

// `ids`: of token `lane`, or of any.
template <int kWords, bool kWhole>
__device__ Routes<kWords> find_routes(const DispatchKernelParams& p, const RankSet<kWords>& active,
                                      const IdBlock<kWhole>& ids) {
  Routes<kWords> routes{};
  const int lane = lane_id();
  if (lane < p.num_tokens) routes.of_token = destinations_of(p, lane, active, ids);
  // A transposition, token by token or rank by rank, whichever is shorter. Where there are more
  // than 32 ranks there are fewer tokens.
  if (kWords > 1 || p.num_tokens <= p.workspace.ep_size) {
    for (int32_t token = 0; token < p.num_tokens; ++token) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t ranks = __shfl_sync(kAllLanes, routes.of_token.words[w], token);
        routes.tokens_to[w] |= ((ranks >> lane) & 1) << token;
      }
    }
  } else {
    for (int32_t rank = 0; rank < p.workspace.ep_size; ++rank) {
      const uint32_t tokens = __ballot_sync(kAllLanes, (routes.of_token.words[0] >> rank) & 1);
      if (lane == rank) routes.tokens_to[0] = tokens;
    }
  }
  return routes;
}

__device__ inline void store_packets(uint8_t* slot, const RecordShape& shape, int32_t q,
                                     const ThreadWords& words, uint32_t epoch) {
#pragma unroll
  for (int j = 0; j < kPacketsPerThread; ++j) {
    store_packet(slot + shape.packet_offset(q, j), words.packet(j, epoch));
  }
}

}  // namespace moe_ep::cake
