// Which row every token gets at every rank, kept whole in the shared memory of each CTA: so any CTA
// can place any token, without atomics on rows and without a kernel before.
//
// Tokens go in groups of 32. For each rank and group the table has one word, whose bit i tells
// whether the group's token i goes to the rank, and the number of rows used there before the group.
// What does not fit at once is done in steps, with the counts carried from step to step.
#pragma once

#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/destinations.cuh"
#include "one_sided/device/id_stream.cuh"
#include "one_sided/device/places.cuh"
#include "one_sided/device/routing.cuh"
#include "transport/device/bit_columns.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::one_sided {

// Shared memory that a table may take: the rest holds rows on their way. Enough for 4096 tokens on
// 32 ranks, or 512 on 256; a step more costs about a microsecond, a stage less costs bandwidth.
inline constexpr int32_t kMaxTableBytes = 26 * 1024;
// Rows within one step are counted in 16 bits.
inline constexpr int32_t kMaxTableGroups = 128;

struct RouteTableShape {
  int32_t tokens;  // of one step; a multiple of kGroupTokens
  int32_t stride;  // groups from one rank to the next; odd, so that lanes meet different banks

  static constexpr RouteTableShape of(int32_t ep_size, int32_t tokens_per_rank) {
    constexpr int32_t kEntryBytes = sizeof(uint32_t) + sizeof(uint16_t);
    const int32_t fitting = kMaxTableBytes / (kEntryBytes * ep_size) - 1;
    const int32_t most = fitting < kMaxTableGroups ? fitting : kMaxTableGroups;
    const int32_t wanted = tokens_per_rank / kGroupTokens + (tokens_per_rank % kGroupTokens != 0);
    const int32_t groups = wanted < 1 ? 1 : wanted < most ? wanted : most;
    return {groups * kGroupTokens, groups | 1};
  }
  MOE_EP_HOST_DEVICE constexpr int32_t entries(int32_t ep_size) const { return stride * ep_size; }
  constexpr int32_t bytes(int32_t ep_size) const {
    return entries(ep_size) * static_cast<int32_t>(sizeof(uint32_t) + sizeof(uint16_t)) +
           ep_size * 2 * static_cast<int32_t>(sizeof(int32_t));
  }
};

// Usual ids of some tokens, on their way to a warp at once: lane l has token l of each group.
struct UsualBatch {
  static constexpr int kGroups = 4;
  UsualIds groups[kGroups];
};

template <int kWords>
class RouteTable {
 public:
  // `memory` has shape.bytes(ep_size), aligned to 4.
  __device__ RouteTable(const DispatchKernelParams& p, const RouteTableShape& shape,
                        uint8_t* memory)
      : p_(p),
        shape_(shape),
        ranks_(p.workspace.ep_size),
        warps_(static_cast<int>(blockDim.x / kWarpSize)),
        warp_(warps_ - 1 - static_cast<int>(threadIdx.x / kWarpSize)),
        before_step_(reinterpret_cast<int32_t*>(memory)),
        in_step_(before_step_ + ranks_),
        columns_(reinterpret_cast<uint32_t*>(in_step_ + ranks_)),
        before_group_(reinterpret_cast<uint16_t*>(columns_ + shape.entries(ranks_))) {
#pragma unroll 1
    for (int32_t rank = warp_; rank < ranks_; rank += warps_) {
      if (lane_id() == 0) before_step_[rank] = in_step_[rank] = 0;  // count_rows: the same lane
    }
  }

  // Reads the ids of the step that begins with token `first`, and calls `meanwhile` once all are
  // asked for. All warps; CTA barriers before, since the last step may still be read, and after.
  // kLoads: those of a warp in flight. With 8, top-8 and int32 they are all of 2048 tokens.
  template <int kLoads, typename Meanwhile>
  __device__ void scan(const RankSet<kWords>& active, int32_t first, const Meanwhile& meanwhile) {
    begin_step(first);
    IdStream ids(p_, first + warp_ * kGroupTokens + lane_id(), warps_ * kGroupTokens,
                 first + tokens_);
    // For all warps the same, so that the compiler sees shuffles among lanes that are together.
    int32_t places = ids.places((groups_ + warps_ - 1) / warps_);
    if (!ids.is_usable()) {
      scan_singly(active);
      places = 0;
    }
    int4 loads[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) loads[i] = ids.load(i, places);
    RankSet<kWords> set{};
    bool is_told = false;
#pragma unroll 1
    for (int32_t place = 0;; place += kLoads) {
      if (!is_told && place + kLoads >= places) {
        meanwhile();
        is_told = true;
      }
      if (place >= places) break;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (place + i >= places) break;
        ids.add_owners(loads[i], set);
        loads[i] = ids.load(place + kLoads + i, places);
        if (ids.ends_token(place + i)) {
          store_columns(warp_ + ids.token_at(place + i) * warps_, active, set);
          set = {};
        }
      }
    }
  }

  // For usual ids, up to 32 ranks: asks for the first ids of a step, and does not look at them.
  __device__ UsualBatch ask_usual(int32_t first) {
    begin_step(first);
    return load_usual(warp_);
  }
  // scan in a quarter of the instructions: those in front of the first row are 1 us for each 370.
  // Behind ask_usual.
  template <typename Meanwhile>
  __device__ void scan_usual(const EvenOwners& owners, const RankSet<kWords>& active,
                             UsualBatch batch, const Meanwhile& meanwhile) {
    static_assert(kWords == 1);
    constexpr int kGroups = UsualBatch::kGroups;
#pragma unroll 1
    for (int32_t first_group = warp_;; first_group += kGroups * warps_) {
      const bool is_last = first_group + kGroups * warps_ >= groups_;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const int32_t group = first_group + i * warps_;
        if (group < groups_) {
          const bool exists = group * kGroupTokens + lane_id() < tokens_;
          store_columns(group, active, {exists ? batch.groups[i].owners(owners) : 0});
        }
        // Not before: the ids are here sooner than the numbers of the items.
        if (i == 0 && is_last) meanwhile();
        if (group >= groups_) break;
      }
      if (is_last) return;
      batch = load_usual(first_group + kGroups * warps_);
    }
  }

  // Numbers the rows of the step. All warps; CTA barriers before and after.
  __device__ void count_rows() {
#pragma unroll 1
    for (int32_t rank = warp_; rank < ranks_; rank += warps_) {
      int32_t used = 0;
#pragma unroll 1
      for (int32_t first = 0; first < groups_; first += kWarpSize) {
        const int32_t group = first + lane_id();
        const int32_t entry = rank * shape_.stride + group;
        const int32_t rows = group < groups_ ? __popc(columns_[entry]) : 0;
        int32_t sum = rows;
#pragma unroll
        for (int distance = 1; distance < kWarpSize; distance *= 2) {
          const int32_t other = __shfl_up_sync(kAllLanes, sum, distance);
          if (lane_id() >= distance) sum += other;
        }
        if (group < groups_) before_group_[entry] = static_cast<uint16_t>(used + sum - rows);
        used += __shfl_sync(kAllLanes, sum, kWarpSize - 1);
      }
      if (lane_id() == 0) {
        before_step_[rank] += in_step_[rank];
        in_step_[rank] = used;
      }
    }
  }

  // Of the current step, behind count_rows.
  __device__ RankRoutes of_rank(int32_t rank) const {
    const bool exists = rank < ranks_;
    const uint32_t entry = held(exists ? rank * shape_.stride : 0);
    return {columns_ + entry, before_group_ + entry, before_step_[exists ? rank : 0], first_,
            exists};
  }

  // Rows sent to a rank up to the end of the current step.
  __device__ int32_t total(int32_t rank) const { return before_step_[rank] + in_step_[rank]; }

 private:
  __device__ void begin_step(int32_t first) {
    first_ = first;
    tokens_ = min(p_.num_tokens - first, shape_.tokens);
    groups_ =
        static_cast<int32_t>(static_cast<uint32_t>(tokens_ + kGroupTokens - 1) / kGroupTokens);
  }

  // Of a warp's groups from `group` on.
  __device__ UsualBatch load_usual(int32_t group) const {
    UsualBatch batch;
#pragma unroll
    for (int i = 0; i < UsualBatch::kGroups; ++i, group += warps_) {
      if (group >= groups_) break;
      const int32_t token = min(group * kGroupTokens + lane_id(), tokens_ - 1);
      batch.groups[i] = UsualIds::load(UsualIds::address(p_, first_ + token));
    }
    return batch;
  }

  // For ids of which only single ones can be loaded.
  __device__ void scan_singly(const RankSet<kWords>& active) {
    constexpr int kInFlight = 8;
    for (int32_t begin = 0; begin < groups_; begin += warps_) {
      const int32_t group = begin + warp_;
      const int32_t token = first_ + group * kGroupTokens + lane_id();
      RankSet<kWords> set{};
#pragma unroll 1
      for (int32_t k = 0; k < p_.workspace.top_k; k += kInFlight) {
        int64_t ids[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          const bool exists =
              token < p_.num_tokens && group < groups_ && k + i < p_.workspace.top_k;
          ids[i] = exists ? expert_id(p_, token, k + i) : -1;
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          if (p_.partition.contains(ids[i])) add_owner(p_, static_cast<int32_t>(ids[i]), set);
        }
      }
      store_columns(group, active, set);
    }
  }

  __device__ void store_columns(int32_t group, const RankSet<kWords>& active,
                                const RankSet<kWords>& set) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t row = set.words[w] & active.words[w];
      const uint32_t column = kWords == 1 ? transposed(row, ranks_) : transposed(row);
      const int32_t rank = w * kWarpSize + lane_id();
      if (rank < ranks_ && group < groups_) columns_[rank * shape_.stride + group] = column;
    }
  }

  const DispatchKernelParams& p_;
  const RouteTableShape& shape_;
  int32_t ranks_;
  int warps_;
  int warp_;                // from the last one: the first ones have rows to load
  int32_t first_ = 0;       // token of the current step
  int32_t tokens_ = 0;      // of the current step
  int32_t groups_ = 0;      // of the current step
  int32_t* before_step_;    // [ep_size] rows used before the current step
  int32_t* in_step_;        // [ep_size] and in it
  uint32_t* columns_;       // [ep_size, stride]
  uint16_t* before_group_;  // [ep_size, stride] rows used in the current step before the group
};

}  // namespace moe_ep::one_sided
