// Which way a step of nvlink_one_sided goes: one table. No way needs a copy engine.
#pragma once

#include <cstdint>

#include "core/geometry.h"
#include "one_sided/small_steps.h"

namespace moe_ep::one_sided {

enum class DispatchPath { kPackets, kDirect, kPut };

constexpr DispatchPath dispatch_path(const Geometry& g, int32_t tokens_per_rank,
                                     bool rows_are_aligned) {
  if (goes_as_packets(g, tokens_per_rank)) return DispatchPath::kPackets;
  return is_dispatched_directly(g, tokens_per_rank, rows_are_aligned) ? DispatchPath::kDirect
                                                                      : DispatchPath::kPut;
}

enum class CombinePath { kPush, kDirect, kGet };

constexpr CombinePath combine_path(const Geometry& g, int32_t tokens_per_rank) {
  if (is_pushed(g, tokens_per_rank)) return CombinePath::kPush;
  return is_summed_directly(g, tokens_per_rank) ? CombinePath::kDirect : CombinePath::kGet;
}

}  // namespace moe_ep::one_sided
