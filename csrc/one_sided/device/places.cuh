// Which row a token gets at a rank, from what a routing table tells of the rank.
#pragma once

#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/routing.cuh"

namespace moe_ep::one_sided {

inline constexpr int32_t kGroupTokens = 32;

// Of one token at one rank.
struct Place {
  bool sent;
  // Within this source's block there. Of a token that is not sent: the row whose ids it blanks. The
  // j-th such token takes the j-th row from the end of the first num_tokens, and these are exactly
  // the rows that stay empty: no pass over them, and nobody needs to know how many there are.
  int32_t row;

  // before: tokens below this one that are sent there.
  __device__ static Place of(const DispatchKernelParams& p, int32_t token, bool sent,
                             int32_t before) {
    if (sent) return {true, before};
    return {false, p.num_tokens - 1 - (token - before)};
  }
};

// What a table tells of one rank, with the addresses at hand. Of a rank at or above ep_size, that
// nothing goes there.
class RankRoutes {
 public:
  // first: token of the table's step.
  __device__ RankRoutes(const uint32_t* columns, const uint16_t* before_group, int32_t before_step,
                        int32_t first, bool exists)
      : columns_(columns),
        before_group_(before_group),
        before_step_(before_step),
        first_(first),
        exists_(exists) {}

  // The token must be of the step.
  __device__ Place place(const DispatchKernelParams& p, int32_t token) const {
    const auto in_step = static_cast<uint32_t>(token - first_);
    const uint32_t group = in_step / kGroupTokens;
    const uint32_t bit = in_step % kGroupTokens;
    const uint32_t column = columns_[group];
    const int32_t before =
        before_step_ + before_group_[group] + __popc(column & bits_below(static_cast<int>(bit)));
    return Place::of(p, token, exists_ && ((column >> bit) & 1), before);
  }

 private:
  const uint32_t* columns_;
  const uint16_t* before_group_;
  int32_t before_step_;
  int32_t first_;
  bool exists_;
};

}  // namespace moe_ep::one_sided
