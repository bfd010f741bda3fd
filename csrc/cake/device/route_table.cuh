// Which row every token gets at every rank, kept whole in the shared memory of each CTA: so any CTA
// can place any token, without atomics on rows and without a kernel before.
//
// Tokens go in groups of 32. For each rank and group the table has one word, whose bit i tells
// whether the group's token i goes to the rank, and the number of rows used there before the group.
// What does not fit at once is done in steps, with the counts carried from step to step.
#pragma once

#include <cstdint>

#include "cake/cuda_params.h"
#include "cake/device/destinations.cuh"
#include "cake/device/id_stream.cuh"
#include "cake/device/routing.cuh"

namespace moe_ep::cake {

inline constexpr int32_t kGroupTokens = 32;
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

// Of a 32 x 32 matrix of bits, a row a lane: lane i gets column i.
__device__ inline uint32_t transposed(uint32_t row) {
  uint32_t low = 0x0000FFFFu;  // columns whose number lacks the bit `distance`
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, row, distance);
    const bool is_upper = (lane_id() & distance) != 0;
    const uint32_t kept = is_upper ? ~low : low;
    row =
        (row & kept) | (__funnelshift_l(other, other, is_upper ? 32 - distance : distance) & ~kept);
    low ^= low << (distance / 2);
  }
  return row;
}

// Of one token at one rank.
struct Place {
  bool sent;
  // Within this source's block there. Of a token that is not sent: the row whose ids it blanks. The
  // j-th such token takes the j-th row from the end of the first num_tokens, and these are exactly
  // the rows that stay empty: no pass over them, and nobody needs to know how many there are.
  int32_t row;
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
        warp_(static_cast<int>(threadIdx.x) / kWarpSize),
        warps_(static_cast<int>(blockDim.x) / kWarpSize),
        before_step_(reinterpret_cast<int32_t*>(memory)),
        in_step_(before_step_ + ranks_),
        columns_(reinterpret_cast<uint32_t*>(in_step_ + ranks_)),
        before_group_(reinterpret_cast<uint16_t*>(columns_ + shape.entries(ranks_))) {
    for (int32_t rank = warp_; rank < ranks_; rank += warps_) {
      if (lane_id() == 0) before_step_[rank] = in_step_[rank] = 0;  // count_rows: the same lane
    }
  }

  // Reads the ids of the step that begins with token `first`, and calls `meanwhile` once all are
  // asked for. All warps; CTA barriers before, since the last step may still be read, and after.
  // The only place where all ids are read. kLoads: those of a warp in flight. With 8, top-8 and
  // int32 they are all of 2048 tokens.
  template <int kLoads, typename Meanwhile>
  __device__ void scan(const RankSet<kWords>& active, int32_t first, const Meanwhile& meanwhile) {
    const int32_t tokens = begin_step(first);
    IdStream ids(p_, first + warp_ * kGroupTokens + lane_id(), warps_ * kGroupTokens,
                 first + tokens);
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
  __device__ void scan(const RankSet<kWords>& active, int32_t first) {
    scan<kWords == 1 ? 8 : 1>(active, first, [] {});
  }

  // The same for usual ids, in a quarter of the instructions: those in front of the first row are
  // 1 us for each 370. Up to 32 ranks.
  template <typename Meanwhile>
  __device__ void scan_usual(const EvenOwners& owners, const RankSet<kWords>& active, int32_t first,
                             const Meanwhile& meanwhile) {
    static_assert(kWords == 1);
    const int32_t tokens = begin_step(first);
    constexpr int kGroups = 4;  // of a warp, on their way at once
    bool is_told = false;
#pragma unroll 1
    for (int32_t next = warp_;; next += kGroups * warps_) {
      UsualIds ids[kGroups];
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const int32_t group = next + i * warps_;
        if (group >= groups_) break;
        const int32_t token = min(group * kGroupTokens + lane_id(), tokens - 1);
        ids[i] = UsualIds::load(UsualIds::address(p_, first + token));
      }
      if (!is_told && next + kGroups * warps_ >= groups_) {
        meanwhile();
        is_told = true;
      }
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const int32_t group = next + i * warps_;
        if (group >= groups_) return;
        const bool exists = group * kGroupTokens + lane_id() < tokens;
        store_columns(group, active, {exists ? ids[i].owners(owners) : 0});
      }
    }
  }

  // Numbers the rows of the step. All warps; CTA barriers before and after.
  __device__ void count_rows() {
    const int32_t groups = (groups_ + kWarpSize - 1) / kWarpSize;  // of a lane, one after the other
    for (int32_t first_rank = 0; first_rank < ranks_; first_rank += warps_) {
      const int32_t rank = first_rank + warp_;
      const int32_t all = rank < ranks_ ? groups_ : 0;
      const int32_t begin = rank * shape_.stride + min(lane_id() * groups, all);
      const int32_t end = rank * shape_.stride + min((lane_id() + 1) * groups, all);
      int32_t rows = 0;
      for (int32_t entry = begin; entry < end; ++entry) rows += __popc(columns_[entry]);
      int32_t sum = rows;
#pragma unroll
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int32_t other = __shfl_up_sync(kAllLanes, sum, distance);
        if (lane_id() >= distance) sum += other;
      }
      int32_t before = sum - rows;
      for (int32_t entry = begin; entry < end; ++entry) {
        before_group_[entry] = static_cast<uint16_t>(before);
        before += __popc(columns_[entry]);
      }
      const int32_t used = __shfl_sync(kAllLanes, sum, kWarpSize - 1);
      if (lane_id() == 0 && rank < ranks_) {
        before_step_[rank] += in_step_[rank];
        in_step_[rank] = used;
      }
    }
  }

  // The token must be of the current step.
  __device__ Place place(int32_t token, int32_t rank) const {
    if (rank >= ranks_) return {false, 0};
    const int32_t bit = (token - first_) % kGroupTokens;
    const int32_t entry = rank * shape_.stride + (token - first_) / kGroupTokens;
    const uint32_t column = columns_[entry];
    const int32_t before =
        before_step_[rank] + before_group_[entry] + __popc(column & bits_below(bit));
    if ((column >> bit) & 1) return {true, before};
    return {false, p_.num_tokens - 1 - (token - before)};
  }

  // Rows sent to a rank up to the end of the current step.
  __device__ int32_t total(int32_t rank) const { return before_step_[rank] + in_step_[rank]; }

 private:
  // Returns the number of its tokens.
  __device__ int32_t begin_step(int32_t first) {
    const int32_t tokens = min(p_.num_tokens - first, shape_.tokens);
    first_ = first;
    groups_ = (tokens + kGroupTokens - 1) / kGroupTokens;
    return tokens;
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
      const uint32_t column = transposed(set.words[w] & active.words[w]);
      const int32_t rank = w * kWarpSize + lane_id();
      if (rank < ranks_ && group < groups_) columns_[rank * shape_.stride + group] = column;
    }
  }

  const DispatchKernelParams& p_;
  const RouteTableShape& shape_;
  int32_t ranks_;
  int warp_;
  int warps_;
  int32_t first_ = 0;       // token of the current step
  int32_t groups_ = 0;      // of the current step
  int32_t* before_step_;    // [ep_size] rows used before the current step
  int32_t* in_step_;        // [ep_size] and in it
  uint32_t* columns_;       // [ep_size, stride]
  uint16_t* before_group_;  // [ep_size, stride] rows used in the current step before the group
};

}  // namespace moe_ep::cake
