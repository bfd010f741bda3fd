// Where the tokens of a small step go, for all warps of a CTA.
//
// The warps share the work and meet at a barrier: if each worked out all routes for itself, a
// multiprocessor would issue the same few hundred instructions 16 times over.
#pragma once

#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/destinations.cuh"
#include "one_sided/device/route_table.cuh"
#include "one_sided/device/routing.cuh"

namespace moe_ep::one_sided {

inline constexpr int32_t kDirectGroups = 4;

// Some ids of a token as they came: not looked at before everything else is on its way, too.
template <typename Id>
struct SomeIds {
  static constexpr int32_t kIds = 4;
  Id values[kIds];

  // Behind the last id the last one comes again: the ranks of a token are a set.
  __device__ static SomeIds load(const DispatchKernelParams& p, int32_t token, int32_t first) {
    SomeIds ids;
    const Id* const from =
        static_cast<const Id*>(p.topk_ids) + static_cast<int64_t>(token) * p.workspace.top_k;
#pragma unroll
    for (int32_t i = 0; i < kIds; ++i) ids.values[i] = from[min(first + i, p.workspace.top_k - 1)];
    return ids;
  }
};

// Lane r of whoever asks stands for rank r: up to 32 ranks. Lives in shared memory.
class DirectRoutes {
 public:
  static constexpr int32_t kMaxTokens = kDirectGroups * kGroupTokens;

  // By all threads, of which there are at least kMaxTokens; a barrier before `add`.
  __device__ void clear() {
    if (threadIdx.x < kMaxTokens) columns_[threadIdx.x / kWarpSize][lane_id()] = 0;
  }

  // For one warp: some ids of token 32 * group + lane, or of any if there are not so many.
  template <typename Id>
  __device__ void add(const DispatchKernelParams& p, const RankSet<1>& active, int32_t group,
                      const SomeIds<Id>& ids) {
    uint32_t ranks = 0;
#pragma unroll
    for (int32_t i = 0; i < SomeIds<Id>::kIds; ++i) {
      const bool is_expert = p.partition.contains(ids.values[i]);
      const int32_t owner =
          p.partition.owner_of(is_expert ? static_cast<int32_t>(ids.values[i]) : 0);
      ranks |= is_expert ? 1u << owner : 0;
    }
    const uint32_t column = column_of(p, active, group, ranks);
    if (column != 0) atomicOr(&columns_[group][lane_id()], column);
  }
  // For one warp: all ranks of token 32 * group + lane. Takes the place of `clear` for the group.
  __device__ void set(const DispatchKernelParams& p, const RankSet<1>& active, int32_t group,
                      uint32_t ranks) {
    columns_[group][lane_id()] = column_of(p, active, group, ranks);
  }

  // At this lane's rank; behind a barrier.
  __device__ Place place(const DispatchKernelParams& p, int32_t token) const {
    const int32_t group = token / kGroupTokens;
    const int32_t bit = token - group * kGroupTokens;
    uint32_t columns[kDirectGroups];  // all loads fly together
#pragma unroll
    for (int32_t g = 0; g < kDirectGroups; ++g) columns[g] = columns_[g][lane_id()];
    uint32_t column = 0;
    int32_t before = 0;
#pragma unroll
    for (int32_t g = 0; g < kDirectGroups; ++g) {
      before += g < group ? __popc(columns[g]) : 0;
      column = g == group ? columns[g] : column;
    }
    before += __popc(column & bits_below(bit));
    return Place::of(p, token, (column >> bit) & 1, before);
  }

  // Rows for this lane's rank; behind a barrier.
  __device__ int32_t total() const {
    int32_t rows = 0;
#pragma unroll
    for (int32_t g = 0; g < kDirectGroups; ++g) rows += __popc(columns_[g][lane_id()]);
    return rows;
  }

 private:
  // The tokens of a group that go to this lane's rank; `ranks`: those of token 32 * group + lane.
  __device__ static uint32_t column_of(const DispatchKernelParams& p, const RankSet<1>& active,
                                       int32_t group, uint32_t ranks) {
    ranks &= group * kGroupTokens + lane_id() < p.num_tokens ? active.words[0] : 0;
    constexpr int32_t kBatch = 8;  // ballots that fly together
    uint32_t column = 0;
#pragma unroll 1
    for (int32_t first = 0; first < p.workspace.ep_size; first += kBatch) {
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        const uint32_t tokens = __ballot_sync(kAllLanes, (ranks >> (first + i)) & 1);
        if (lane_id() == first + i) column = tokens;
      }
    }
    return column;
  }

  // Of a group of 32 tokens and a rank: bit i tells whether the group's token i goes there.
  uint32_t columns_[kDirectGroups][kWarpSize];
};

// The ids that a warp of a CTA adds to the routes. They are loaded when this is made.
template <typename Id>
class IdShare {
 public:
  static constexpr bool kAddsToRoutes = true;  // these must be clear

  // group_bits: there are at most 2 to that groups.
  __device__ IdShare(const DispatchKernelParams& p, int32_t group_bits, int32_t warp_in_cta)
      : p_(p), group_bits_(group_bits), unit_(warp_in_cta) {
    load();
  }

  __device__ void add_to(DirectRoutes& routes, const EvenOwners&, const RankSet<1>& active,
                         int32_t warps_in_cta) {
#pragma unroll 1
    while (first_id() < p_.workspace.top_k) {
      if (has_tokens()) routes.add(p_, active, group(), ids_);
      unit_ += warps_in_cta;
      load();
    }
  }

 private:
  __device__ int32_t group() const { return unit_ & ((1 << group_bits_) - 1); }
  __device__ int32_t first_id() const { return (unit_ >> group_bits_) * SomeIds<Id>::kIds; }
  __device__ bool has_tokens() const { return group() * kGroupTokens < p_.num_tokens; }
  __device__ void load() {
    if (first_id() >= p_.workspace.top_k || !has_tokens()) return;
    const int32_t token = min(group() * kGroupTokens + lane_id(), p_.num_tokens - 1);
    ids_ = SomeIds<Id>::load(p_, token, first_id());
  }

  const DispatchKernelParams& p_;
  int32_t group_bits_;
  int32_t unit_;  // the groups with their first ids, then with their next, and so on
  SomeIds<Id> ids_{};
};

// The same for usual ids, a warp a group: 1 us less in front of the first row.
class UsualIdShare {
 public:
  static constexpr bool kAddsToRoutes = false;

  __device__ UsualIdShare(const DispatchKernelParams& p, int32_t, int32_t warp_in_cta)
      : p_(p), group_(warp_in_cta) {
    if (!has_tokens()) return;
    const int32_t token = min(group_ * kGroupTokens + lane_id(), p.num_tokens - 1);
    ids_ = UsualIds::load(UsualIds::address(p, token));
  }

  __device__ void add_to(DirectRoutes& routes, const EvenOwners& owners, const RankSet<1>& active,
                         int32_t) {
    if (group_ >= kDirectGroups) return;
    routes.set(p_, active, group_, has_tokens() ? ids_.owners(owners) : 0);
  }

 private:
  __device__ bool has_tokens() const { return group_ * kGroupTokens < p_.num_tokens; }

  const DispatchKernelParams& p_;
  int32_t group_;
  UsualIds ids_{};
};

}  // namespace moe_ep::one_sided
