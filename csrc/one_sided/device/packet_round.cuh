// What the warps of a packet dispatch share: its parameters, and where the tokens go.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/fast_divide.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/destinations.cuh"
#include "one_sided/device/packets.cuh"
#include "one_sided/device/record.cuh"
#include "one_sided/device/record_access.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/usual_record.cuh"

namespace moe_ep::one_sided {

// What a kernel may assume of the arguments.
enum class PacketInputs {
  kAny,
  kWhole,  // all parts of a record are whole, on both sides
  // Whole; up to 32 ranks that own the same number of experts; eight int32 ids a token; one payload
  // of rows that are most of the record, maybe scales of theirs, weights, no statistics; the mask
  // not in device memory.
  // With one token a warp then comes from its ids to its first packet in 114 instructions, where
  // kWhole took 322: some 0.5 us of the step. And it is ready for its ids after 130 instead of 380,
  // which took another 0.5 us wherever the kernel before was over by then.
  kUsual,
};

// What a usual step needs comes first, as in DispatchKernelParams.
struct PacketDispatchParams {
  UsualParts usual;      // if the step is a usual one
  uint32_t usual_ranks;  // that take part, a bit each, likewise
  EvenOwners owners;
  RecordShape record;
  FastDivider by_record_pieces;
  FastDivider by_tokens_per_rank;
  DispatchKernelParams dispatch;
  RecordParts parts;
  RecordShape stats;  // no pieces: no statistics travel
  FastDivider by_stats_pieces;

  static PacketDispatchParams of(const DispatchKernelParams& p) {
    const RecordParts parts = RecordParts::of(p);
    const RecordShape record = RecordShape::of(p.num_chunks);
    const auto words = static_cast<uint64_t>(p.workspace.eplb_stats_num_experts);
    RecordShape stats{};
    if (p.eplb_local_stats != nullptr) {
      stats = RecordShape::of(static_cast<int32_t>(PacketSlots::chunks_of_words(words)));
    }
    const bool is_usual = UsualParts::can_stand_for(parts, record);
    return {.usual = is_usual ? UsualParts::of(parts) : UsualParts{},
            .usual_ranks = static_cast<uint32_t>(p.active.fixed.words[0] &
                                                 RankMask::all(p.workspace.ep_size).words[0]),
            .owners = EvenOwners::of(p.partition, p.workspace.ep_size),
            .record = record,
            .by_record_pieces = FastDivider(record.pieces),
            .by_tokens_per_rank = FastDivider(std::max(p.tokens_per_rank, 1)),
            .dispatch = p,
            .parts = parts,
            .stats = stats,
            .by_stats_pieces = FastDivider(std::max(stats.pieces, 1))};
  }
  // Of the thread's chunks, where the inputs lie or where what has come is put.
  template <PacketInputs kInputs, bool kInput>
  __device__ ChunkPlaces places(int64_t row, int32_t q) const {
    if constexpr (kInputs == PacketInputs::kUsual) {
      return places_of<kInput>(usual, record, row, q);
    } else {
      return places_of<kInput>(parts, record, row, q);
    }
  }
  template <PacketInputs kInputs>
  __device__ ThreadWords load(const ChunkPlaces& inputs, int32_t q) const {
    if constexpr (kInputs == PacketInputs::kUsual) {
      return load_record(usual, record, inputs, q);
    } else {
      return load_record<kInputs == PacketInputs::kWhole>(parts, record, inputs, q);
    }
  }
  template <PacketInputs kInputs>
  __device__ void store(const ChunkPlaces& outputs, int32_t q, const ThreadWords& words) const {
    if constexpr (kInputs == PacketInputs::kUsual) {
      store_record(usual, record, outputs, q, words);
    } else {
      store_record<kInputs == PacketInputs::kWhole>(parts, record, outputs, q, words);
    }
  }
  // Known without a look at memory where it is none.
  template <PacketInputs kInputs>
  __device__ int32_t stats_pieces() const {
    return kInputs == PacketInputs::kUsual ? 0 : stats.pieces;
  }
  PacketInputs inputs() const {
    if (!parts.are_whole) return PacketInputs::kAny;
    const bool usual = owners.are_even && dispatch.workspace.ep_size <= kWarpSize &&
                       dispatch.workspace.top_k == UsualIds::kIds && dispatch.ids_are_vectors &&
                       UsualParts::can_stand_for(parts, record) && stats.pieces == 0 &&
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

}  // namespace moe_ep::one_sided
