// The ranks that a token goes to, with its ids loaded ahead of what is made of them.
#pragma once

#include <cstdint>

#include "core/expert_partition.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/routing.cuh"

namespace moe_ep::one_sided {

// Some ids of a token as they came. They are loaded without a branch and not looked at before
// everything is on its way, so that all take one wait, and other loads fly with them. Behind the
// last id the last ones come again: the ranks of a token are a set.
//
// kWhole: rows of ids start on 16 bytes and are of whole 16 bytes.
template <bool kWhole>
struct IdBlock {
  static constexpr int kIds = 8;
  uint32_t words[2 * kIds];  // int32: the ids and, behind them or between, words of no meaning

  __device__ static IdBlock load(const DispatchKernelParams& p, int32_t token, int32_t first) {
    IdBlock block;
    const int32_t words_per_id = p.ids_are_int64 ? 2 : 1;
    const int32_t left = (p.workspace.top_k - first) * words_per_id;  // words
    const int64_t start = (static_cast<int64_t>(token) * p.workspace.top_k + first) * words_per_id;
    const auto* const from = static_cast<const uint32_t*>(p.topk_ids) + start;
    if constexpr (kWhole) {
#pragma unroll
      for (int i = 0; i < 2 * kIds; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(from + min(i, left - 4));
        block.words[i] = four.x;
        block.words[i + 1] = four.y;
        block.words[i + 2] = four.z;
        block.words[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kIds; ++i) {
        const int32_t low = min(i * words_per_id, left - words_per_id);
        block.words[2 * i] = from[low];
        block.words[2 * i + 1] = from[low + words_per_id - 1];
      }
    }
    return block;
  }

  // An id, or -1 for what is no expert and too wide for 32 bits.
  __device__ int32_t id(bool is_int64, int i) const {
    const uint32_t low = words[2 * i];
    const uint32_t id = is_int64 ? (words[2 * i + 1] == 0 ? low : ~0u) : kWhole ? words[i] : low;
    return static_cast<int32_t>(id);
  }
};

// The owner of an expert where all ranks own the same number of them: one multiplication. What lies
// outside [0, num_experts), as an unsigned number, has an owner at or above ep_size.
struct EvenOwners {
  uint32_t multiplier;
  uint32_t num_experts;
  bool are_even;  // if not, this is of no use

  // Exact: the multiplier exceeds 2^32 / share by less than one, so a product exceeds the quotient
  // by less than expert / 2^32, too little to reach the next integer as long as
  // num_experts * share <= 2^32.
  static EvenOwners of(const ExpertPartition& partition, int32_t ep_size) {
    const ExpertRange last = partition.of_rank(ep_size - 1);
    const auto share = static_cast<uint64_t>(last.count);
    const auto num_experts = static_cast<uint64_t>(last.first) + share;
    const bool are_even = share >= 2 &&
                          share == static_cast<uint64_t>(partition.of_rank(0).count) &&
                          num_experts * share <= uint64_t{1} << 32;
    if (!are_even) return {};
    const uint64_t multiplier = ((uint64_t{1} << 32) + share - 1) / share;
    return {static_cast<uint32_t>(multiplier), static_cast<uint32_t>(num_experts), true};
  }
  // Up to 32 ranks, a bit each; an id that is no expert has a bit behind those of the ranks, or
  // none.
  __device__ uint32_t bit_of_owner(uint32_t expert) const {
    return __funnelshift_lc(0, 1, __umulhi(expert, multiplier));  // a shift by 32 or more gives 0
  }
};

// The ids of a token of a usual step: eight int32 that start on 16 bytes.
struct UsualIds {
  static constexpr int kIds = 8;
  uint4 low;
  uint4 high;

  __device__ static const uint4* address(const DispatchKernelParams& p, int32_t token) {
    return static_cast<const uint4*>(p.topk_ids) + 2 * token;
  }
  __device__ static UsualIds load(const uint4* ids) { return {ids[0], ids[1]}; }

  __device__ uint32_t owners(const EvenOwners& of) const {
    return of.bit_of_owner(low.x) | of.bit_of_owner(low.y) | of.bit_of_owner(low.z) |
           of.bit_of_owner(low.w) | of.bit_of_owner(high.x) | of.bit_of_owner(high.y) |
           of.bit_of_owner(high.z) | of.bit_of_owner(high.w);
  }
};

// The active ranks that own one of the token's experts. `block` has its first ids.
template <int kWords, bool kWhole>
__device__ RankSet<kWords> destinations_of(const DispatchKernelParams& p, int32_t token,
                                           const RankSet<kWords>& active, IdBlock<kWhole> block) {
  constexpr int kIds = IdBlock<kWhole>::kIds;
  RankSet<kWords> set{};
#pragma unroll 1
  for (int32_t next = kIds;; next += kIds) {
#pragma unroll
    for (int i = 0; i < kIds; ++i) {
      const int32_t id = block.id(p.ids_are_int64, i);
      const bool is_expert = p.partition.contains(id);
      const int32_t owner = p.partition.owner_of(is_expert ? id : 0);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        set.words[w] |= is_expert && w == owner / kWarpSize ? 1u << (owner % kWarpSize) : 0;
      }
    }
    if (next >= p.workspace.top_k) break;
    block = IdBlock<kWhole>::load(p, token, next);
  }
#pragma unroll
  for (int w = 0; w < kWords; ++w) set.words[w] &= active.words[w];
  return set;
}

}  // namespace moe_ep::one_sided
