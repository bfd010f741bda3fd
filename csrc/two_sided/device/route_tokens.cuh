// Where the tokens of a rank go. Each CTA counts the rows of all tokens and writes the lists for a
// slice of them, so that none waits for another.
#pragma once

#include <cstdint>

#include "transport/device/bit_columns.cuh"
#include "transport/device/warp.cuh"
#include "two_sided/channels.h"
#include "two_sided/cuda_params.h"

namespace moe_ep::two_sided {

inline constexpr int kPrepareThreads = 512;
inline constexpr int kPrepareWarps = kPrepareThreads / kWarpSize;
// A warp has at most one group of 32.
inline constexpr int32_t kSliceTokens = kPrepareThreads;

__device__ inline int64_t expert_id(const PrepareParams& call, int64_t index) {
  return call.ids_are_int64 ? static_cast<const int64_t*>(call.topk_ids)[index]
                            : static_cast<const int32_t*>(call.topk_ids)[index];
}

class TokenRouting {
 public:
  // Of each rank, in shared memory.
  struct Counts {
    int32_t total[kMaxEpSize];
    int32_t begin[kMaxEpSize];   // where its list begins in send_tokens
    int32_t before[kMaxEpSize];  // rows of the tokens in front of the slice
    // By group of the slice; a pitch that is odd, so that lanes meet different banks.
    uint32_t tokens[kMaxEpSize][kPrepareWarps + 1];   // bit i: its token i has a row
    int32_t in_slice[kMaxEpSize][kPrepareWarps + 1];  // rows of the groups before
  };

  __device__ TokenRouting(const PrepareKernelParams& p, Counts& counts)
      : p_(p),
        counts_(counts),
        ep_size_(p.call.workspace.geometry.ep_size),
        groups_(static_cast<int32_t>((int64_t{p.call.num_tokens} + kWarpSize - 1) / kWarpSize)),
        first_group_(static_cast<int32_t>(blockIdx.x) * kPrepareWarps) {}

  // By all threads, as what follows. Its result is there for all.
  __device__ void count() {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    if (thread < ep_size_) counts_.total[thread] = counts_.before[thread] = 0;
    __syncthreads();
    for (int32_t window = 0; window * kWarpSize < ep_size_; ++window) count(window);
    __syncthreads();
    for (int32_t rank = warp(); rank < ep_size_; rank += kPrepareWarps) {
      const uint32_t tokens = lane_id() < kPrepareWarps ? counts_.tokens[rank][lane_id()] : 0;
      const int32_t before = sum_of_lanes_before(__popc(tokens));
      if (lane_id() < kPrepareWarps) counts_.in_slice[rank][lane_id()] = before;
    }
    if (warp() == kPrepareWarps - 1) place_lists();
    __syncthreads();
  }

  // The lists of the slice's tokens.
  __device__ void write_lists() const {
    const int32_t first = (first_group_ + warp()) * kWarpSize;
    const int32_t token = first + lane_id();
    for (int32_t rank = 0; rank < ep_size_; ++rank) {
      const uint32_t tokens = counts_.tokens[rank][warp()];
      if (((tokens >> lane_id()) & 1) == 0) continue;
      const int32_t row = rows_before(rank, warp(), lane_id());
      p_.call.out_send_tokens[counts_.begin[rank] + row] = token;
    }
  }

  // visit(rank, bound, rows) for each bound in front of the slice's tokens, and behind all: with
  // the rows for a rank in front of that.
  template <typename Visit>
  __device__ void for_each_bound(const Visit& visit) const {
    const int32_t num_tokens = p_.call.num_tokens;
    const int32_t num_bounds = p_.call.workspace.geometry.num_channels;
    const bool is_last = blockIdx.x + 1 == gridDim.x;
    const int32_t begin =
        blockIdx.x == 0 ? 0 : first_bound_at(first_token(), num_tokens, num_bounds);
    const int32_t end =
        is_last ? num_bounds + 1 : first_bound_at(end_token(), num_tokens, num_bounds);
    const int32_t bounds = end - begin;
    for (auto i = static_cast<int32_t>(threadIdx.x); i < ep_size_ * bounds; i += kPrepareThreads) {
      const int32_t rank = i / bounds;
      const int32_t bound = begin + i - rank * bounds;
      const int32_t token = token_at_bound(num_tokens, bound, num_bounds) - first_token();
      const int32_t group = min(token / kWarpSize, kPrepareWarps - 1);
      visit(rank, bound, rows_before(rank, group, token - group * kWarpSize));
    }
  }

  // Tokens of the slice.
  __device__ int32_t first_token() const { return first_group_ * kWarpSize; }
  __device__ int32_t end_token() const {
    return min(first_token() + kSliceTokens, p_.call.num_tokens);
  }

 private:
  __device__ static int32_t warp() { return static_cast<int32_t>(threadIdx.x / kWarpSize); }

  __device__ static int32_t sum_of_lanes_before(int32_t value) {
    int32_t sum = value;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const int32_t before = __shfl_up_sync(kAllLanes, sum, distance);
      if (lane_id() >= distance) sum += before;
    }
    return sum - value;
  }

  // Rows for a rank in front of a token of a group of the slice. token: up to 32, behind all.
  __device__ int32_t rows_before(int32_t rank, int32_t group, int32_t token) const {
    const uint32_t tokens = counts_.tokens[rank][group];
    const uint32_t in_front = token < kWarpSize ? tokens & bits_below(token) : tokens;
    return counts_.before[rank] + counts_.in_slice[rank][group] + __popc(in_front);
  }

  static constexpr uint32_t kNoExpert = ~0u;

  // The ids of a token, as far as they are loaded at once.
  struct Ids {
    static constexpr int kVectors = 4;
    uint4 vectors[kVectors];
  };
  __device__ Ids load(int32_t token) const {
    Ids ids{};
    if (token >= p_.call.num_tokens) return ids;
    const uint4* const from = p_.id_vectors + int64_t{token} * p_.vectors_per_token;
#pragma unroll
    for (int i = 0; i < Ids::kVectors; ++i) {
      if (i < p_.vectors_per_token) ids.vectors[i] = from[i];
    }
    return ids;
  }
  __device__ void add_owner(uint32_t id, uint32_t window, uint32_t& ranks) const {
    const auto expert = static_cast<int32_t>(id);
    const bool exists = p_.partition.contains(expert);
    const auto owner = static_cast<uint32_t>(p_.partition.owner_of(exists ? expert : 0));
    if (exists && owner / kWarpSize == window) ranks |= 1u << (owner % kWarpSize);
  }
  __device__ void add_owners(uint4 ids, uint32_t window, uint32_t& ranks) const {
    const bool is_int64 = p_.call.ids_are_int64;
    add_owner(!is_int64 || ids.y == 0 ? ids.x : kNoExpert, window, ranks);
    add_owner(!is_int64 || ids.w == 0 ? ids.z : kNoExpert, window, ranks);
    if (is_int64) return;
    add_owner(ids.y, window, ranks);
    add_owner(ids.w, window, ranks);
  }
  // The ranks of a window of 32 that a token goes to; none of a token that there is not.
  __device__ uint32_t ranks_of(int32_t token, const Ids& ids, uint32_t window) const {
    if (token >= p_.call.num_tokens) return 0;
    uint32_t ranks = 0;
#pragma unroll
    for (int i = 0; i < Ids::kVectors; ++i) {
      if (i < p_.vectors_per_token) add_owners(ids.vectors[i], window, ranks);
    }
    const uint4* const from = p_.id_vectors + int64_t{token} * p_.vectors_per_token;
#pragma unroll 1
    for (int i = Ids::kVectors; i < p_.vectors_per_token; ++i) {
      add_owners(from[i], window, ranks);
    }
    if (p_.vectors_per_token > 0) return ranks;
    const int32_t top_k = p_.call.workspace.geometry.top_k;
#pragma unroll 1
    for (int32_t k = 0; k < top_k; ++k) {
      const int64_t expert = expert_id(p_.call, int64_t{token} * top_k + k);
      add_owner(p_.partition.contains(expert) ? static_cast<uint32_t>(expert) : kNoExpert, window,
                ranks);
    }
    return ranks;
  }

  // Of all tokens; and which of the slice's go to each rank.
  __device__ void count(int32_t window) {
    const int32_t ranks = min(ep_size_ - window * kWarpSize, kWarpSize);
    const int32_t rank = window * kWarpSize + lane_id();
    int32_t before = 0;
    int32_t rows = 0;
    uint32_t of_slice = 0;
    Ids next = load(warp() * kWarpSize + lane_id());
#pragma unroll 1
    for (int32_t group = warp(); group < groups_; group += kPrepareWarps) {
      const int32_t token = group * kWarpSize + lane_id();
      const Ids ids = next;
      next = load(token + kSliceTokens);
      // Lane l gets the tokens of the group that go to rank l of the window.
      const uint32_t tokens =
          transposed(ranks_of(token, ids, static_cast<uint32_t>(window)), ranks);
      if (group < first_group_) before += __popc(tokens);
      rows += __popc(tokens);
      if (group - warp() == first_group_) of_slice = tokens;
    }
    if (lane_id() >= ranks) return;
    counts_.tokens[rank][warp()] = of_slice;
    atomicAdd(&counts_.before[rank], before);
    atomicAdd(&counts_.total[rank], rows);
  }

  // By one warp.
  __device__ void place_lists() {
    int32_t begin = 0;
    for (int32_t window = 0; window * kWarpSize < ep_size_; ++window) {
      const int32_t rank = window * kWarpSize + lane_id();
      const int32_t rows = rank < ep_size_ ? counts_.total[rank] : 0;
      const int32_t before = sum_of_lanes_before(rows);
      if (rank < ep_size_) counts_.begin[rank] = begin + before;
      begin += __shfl_sync(kAllLanes, before + rows, kWarpSize - 1);
    }
  }

  const PrepareKernelParams& p_;
  Counts& counts_;
  int32_t ep_size_;
  int32_t groups_;       // of 32 tokens that follow each other, of all tokens
  int32_t first_group_;  // of this CTA's slice
};

}  // namespace moe_ep::two_sided
