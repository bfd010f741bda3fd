// Which way a step of cake goes: one table.
#pragma once

#include <cstdint>

#include "core/geometry.h"
#include "one_sided/small_steps.h"

namespace moe_ep::cake {

enum class DispatchPath { kPackets, kDirect, kBulk };

constexpr DispatchPath dispatch_path(const Geometry& g, int32_t tokens_per_rank,
                                     bool rows_are_aligned) {
  if (one_sided::goes_as_packets(g, tokens_per_rank)) return DispatchPath::kPackets;
  return one_sided::is_dispatched_directly(g, tokens_per_rank, rows_are_aligned)
             ? DispatchPath::kDirect
             : DispatchPath::kBulk;
}

enum class CombinePath { kPush, kDirect, kBulk };

constexpr CombinePath combine_path(const Geometry& g, int32_t tokens_per_rank) {
  if (one_sided::is_pushed(g, tokens_per_rank)) return CombinePath::kPush;
  return one_sided::is_summed_directly(g, tokens_per_rank) ? CombinePath::kDirect
                                                           : CombinePath::kBulk;
}

}  // namespace moe_ep::cake
