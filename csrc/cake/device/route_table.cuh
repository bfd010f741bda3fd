// Which row every token gets at every rank, kept whole in the shared memory of each CTA: so any CTA
// can place any token, without atomics on rows and without a kernel before.
//
// Tokens go in groups of 32. For each rank and group the table has one word, whose bit i tells
// whether the group's token i goes to the rank, and the number of rows used there before the group.
// What does not fit at once is done in steps, with the counts carried from step to step.
#pragma once

#include <cstdint>

#include "cake/cuda_params.h"
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
    row = (lane_id() & distance) == 0 ? (row & low) | ((other & low) << distance)
                                      : (row & ~low) | ((other >> distance) & low);
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

  // Reads the ids of the step that begins with token `first`. All warps; CTA barriers before, since
  // the last step may still be read, and after. The only place where all ids are read.
  __device__ void scan(const RankSet<kWords>& active, int32_t first) {
    constexpr int kBatch = kWords == 1 ? 4 : 1;  // groups with their loads in flight together
    first_ = first;
    groups_ = (min(p_.num_tokens - first, shape_.tokens) + kGroupTokens - 1) / kGroupTokens;
    for (int32_t group = warp_; group < groups_; group += kBatch * warps_) {
      RankSet<kWords> sets[kBatch] = {};
      read_destinations(first + group * kGroupTokens + lane_id(), sets);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) store_columns(group + b * warps_, active, sets[b]);
    }
  }

  // Numbers the rows of the step. All warps; CTA barriers before and after.
  __device__ void count_rows() {
    for (int32_t rank = warp_; rank < ranks_; rank += warps_) {
      int32_t used = 0;
      for (int32_t begin = 0; begin < groups_; begin += kWarpSize) {
        const int32_t group = begin + lane_id();
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
  // Adds the owners of the picks of tokens `token`, `token` + one group a warp, and so on.
  template <int kBatch>
  __device__ void read_destinations(int32_t token, RankSet<kWords> (&sets)[kBatch]) const {
    const int32_t left = p_.num_tokens - token;
    const int32_t apart = warps_ * kGroupTokens;
    if (p_.ids_are_vectors) {
      const int32_t vectors = p_.workspace.top_k / 4;
      const int4* ids =
          static_cast<const int4*>(p_.topk_ids) + static_cast<int64_t>(token) * vectors;
#pragma unroll 2
      for (int32_t v = 0; v < vectors; ++v) {
        int4 four[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          four[b] = b * apart < left ? ids[static_cast<int64_t>(b * apart) * vectors + v]
                                     : make_int4(-1, -1, -1, -1);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          add_owner(p_, four[b].x, sets[b]);
          add_owner(p_, four[b].y, sets[b]);
          add_owner(p_, four[b].z, sets[b]);
          add_owner(p_, four[b].w, sets[b]);
        }
      }
    } else {
      for (int32_t k = 0; k < p_.workspace.top_k; ++k) {
        int64_t id[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          id[b] = b * apart < left ? expert_id(p_, token + b * apart, k) : -1;
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) add_owner(p_, id[b], sets[b]);
      }
    }
  }

  __device__ void store_columns(int32_t group, const RankSet<kWords>& active,
                                const RankSet<kWords>& set) {
    if (group >= groups_) return;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t column = transposed(set.words[w] & active.words[w]);
      const int32_t rank = w * kWarpSize + lane_id();
      if (rank < ranks_) columns_[rank * shape_.stride + group] = column;
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
