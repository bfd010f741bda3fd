// What the warps of a packet dispatch share: its parameters, and where the tokens go.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cake/cuda_params.h"
#include "cake/device/destinations.cuh"
#include "cake/device/packets.cuh"
#include "cake/device/record.cuh"
#include "cake/device/routing.cuh"
#include "core/fast_divide.h"

namespace moe_ep::cake {

// What a kernel may assume of the arguments.
enum class PacketInputs {
  kAny,
  kWhole,  // all parts of a record are whole, on both sides
  // Whole; up to 32 ranks that own the same number of experts; eight int32 ids a token; weights, no
  // statistics; the mask not in device memory. With one token a warp then comes from its ids to its
  // first packet in 114 instructions, where kWhole took 322: some 0.5 us of the step.
  kUsual,
};

struct PacketDispatchParams {
  DispatchKernelParams dispatch;
  RecordParts parts;
  RecordShape record;
  RecordShape stats;  // no pieces: no statistics travel
  FastDivider by_record_pieces;
  FastDivider by_stats_pieces;
  FastDivider by_tokens_per_rank;
  EvenOwners owners;
  uint32_t usual_ranks;  // that take part, a bit each, if the step is a usual one

  static PacketDispatchParams of(const DispatchKernelParams& p) {
    const RecordShape record = RecordShape::of(p.num_chunks);
    const auto words = static_cast<uint64_t>(p.workspace.eplb_stats_num_experts);
    RecordShape stats{};
    if (p.eplb_local_stats != nullptr) {
      stats = RecordShape::of(static_cast<int32_t>(PacketSlots::chunks_of_words(words)));
    }
    return {.dispatch = p,
            .parts = RecordParts::of(p),
            .record = record,
            .stats = stats,
            .by_record_pieces = FastDivider(record.pieces),
            .by_stats_pieces = FastDivider(std::max(stats.pieces, 1)),
            .by_tokens_per_rank = FastDivider(std::max(p.tokens_per_rank, 1)),
            .owners = EvenOwners::of(p.partition, p.workspace.ep_size),
            .usual_ranks = static_cast<uint32_t>(p.active.fixed.words[0] &
                                                 RankMask::all(p.workspace.ep_size).words[0])};
  }
  PacketInputs inputs() const {
    if (!parts.are_whole) return PacketInputs::kAny;
    const bool usual = owners.are_even && dispatch.workspace.ep_size <= kWarpSize &&
                       dispatch.workspace.top_k == UsualIds::kIds && dispatch.ids_are_vectors &&
                       dispatch.has_weights && stats.pieces == 0 &&
                       dispatch.active.on_device == nullptr;
    return usual ? PacketInputs::kUsual : PacketInputs::kWhole;
  }
};

// Where the tokens of this rank go: lane t has the ranks of token t. A rank's column is a ballot,
// so that a send asks for what it needs and nothing is transposed in front of the first.
template <int kWords>
struct Routes {
  RankSet<kWords> of_token;

  // Ranks 32 * w and up of a token, for all lanes.
  __device__ uint32_t ranks_of(int w, int32_t token) const {
    return __shfl_sync(kAllLanes, word(w), token);
  }
  // The tokens that go to rank 32 * w + bit, a bit each, for all lanes.
  __device__ uint32_t tokens_to(int w, int32_t bit) const {
    return __ballot_sync(kAllLanes, (word(w) >> bit) & 1);
  }

 private:
  // Without an index at run time, which would move the words out of registers.
  __device__ uint32_t word(int w) const {
    uint32_t result = of_token.words[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) result = i == w ? of_token.words[i] : result;
    return result;
  }
};

// The ids of one token a lane, loaded ahead of what is made of them.
template <int kWords, PacketInputs kInputs>
struct TokenIds {
  IdBlock<kInputs == PacketInputs::kWhole> first;

  __device__ static const void* address(const DispatchKernelParams& p) { return p.topk_ids; }
  __device__ static TokenIds load(const DispatchKernelParams& p, const void*) {
    return {decltype(first)::load(p, min(lane_id(), max(p.num_tokens, 1) - 1), 0)};
  }
  __device__ RankSet<kWords> ranks(const PacketDispatchParams& params,
                                   const RankSet<kWords>& active) const {
    return destinations_of(params.dispatch, min(lane_id(), max(params.dispatch.num_tokens, 1) - 1),
                           active, first);
  }
};

template <int kWords>
struct TokenIds<kWords, PacketInputs::kUsual> {
  static_assert(kWords == 1);
  UsualIds all;

  __device__ static const void* address(const DispatchKernelParams& p) {
    return UsualIds::address(p, min(lane_id(), max(p.num_tokens, 1) - 1));
  }
  __device__ static TokenIds load(const DispatchKernelParams&, const void* at) {
    return {UsualIds::load(static_cast<const uint4*>(at))};
  }
  __device__ RankSet<1> ranks(const PacketDispatchParams& params, const RankSet<1>& active) const {
    return {all.owners(params.owners) & active.words[0]};
  }
};

}  // namespace moe_ep::cake
