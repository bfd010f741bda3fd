// How a kernel goes that sums any number of tokens with its warps alone: items from a counter, once
// the flags of all ranks have come.
#pragma once

#include <algorithm>
#include <cstdint>

#include "one_sided/combine_plan.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/bounded_wait.cuh"
#include "one_sided/device/combine_enter.cuh"
#include "one_sided/device/item_feed.cuh"
#include "one_sided/device/rows_read.cuh"

namespace moe_ep::one_sided {

// How the sums are cut and dealt out. Made by the launcher: in constant memory it takes no
// registers.
struct SumPlan {
  uint32_t pieces_per_row;
  uint32_t pieces_per_item;
  ItemPlan items;
  Share share;

  static uint32_t items_per_row(uint32_t pieces_per_row, uint32_t pieces_per_item) {
    return static_cast<uint32_t>(divide_up(pieces_per_row, pieces_per_item));
  }
  // sum_warps: of each of the `ctas`.
  SumPlan(const CombineKernelParams& p, uint32_t pieces, uint32_t per_item, int ctas,
          uint32_t sum_warps)
      : pieces_per_row(pieces),
        pieces_per_item(per_item),
        items(p, items_per_row(pieces, per_item),
              FastDivider(std::max(static_cast<int32_t>(items_per_row(pieces, per_item)), 1))),
        share(items.total, static_cast<uint32_t>(ctas), sum_warps, 1) {}
};

// By one of the `warps` warps of each CTA that sum: `item`, and then what `feed` gives. valid:
// whether sums may be formed. sum(item, is_last): by one warp.
template <typename Sum>
__device__ void sum_from(const CombineKernelParams& p, const SumPlan& plan, ItemFeed& feed,
                         Item item, bool valid, uint32_t warps, Sum sum) {
  const uint32_t total = plan.items.total;
  // After a failure the counter may not have been reset: then each warp has a fixed share, too.
  uint32_t fixed = total;
  if (!valid && has_failed(p.workspace)) {
    fixed = threadIdx.x / kWarpSize * gridDim.x + blockIdx.x;
  }
  while (fixed < total || item.token != kNoItem) {
    Item current = item;
    if (fixed < total) {
      const uint32_t token = fixed / plan.items.parts;
      current = {token, fixed - token * plan.items.parts, {-1, 0}};
      fixed += warps * gridDim.x;
    } else {
      item = feed.next();
    }
    sum(current, fixed >= total && item.token == kNoItem);
  }
}

// By all threads of every CTA: the whole kernel. kSumWarps warps of each CTA sum; one more, its
// last, speaks with the peers. meanwhile(): what summing warps do before the flags are there.
// sum(item, valid): by one warp; valid: whether sums may be formed.
template <uint32_t kSumWarps, typename Meanwhile, typename Sum>
__device__ void sum_items(const CombineKernelParams& p, const StagePlan& stage, const SumPlan& plan,
                          Meanwhile meanwhile, Sum sum) {
  const bool is_staged = p.expert_output != nullptr;
  if (is_staged) {
    begin_combine<true>(p, stage);
  } else {
    begin_combine<false>(p, stage);
  }
  const auto warp = threadIdx.x / kWarpSize;
  ItemFeed feed(p, plan.items);
  Item item = kNothing;
  bool ready = true;
  if (speaks_with_peers()) {
    ready = exchange_flags(p, is_staged ? FlagsAreSet::kLater : FlagsAreSet::kBehindFence);
  } else {
    if (warp < plan.share.warps) {
      const uint32_t taken = feed.take(1);
      item = feed.at(taken);
      if (plan.share.more && taken < plan.items.total) feed.look_ahead();
    }
    meanwhile();
  }
  const bool valid = agree_on_rows(ready);
  sum_from(p, plan, feed, item, valid, kSumWarps + 1,
           [&](const Item& one, bool) { sum(one, valid); });
  tell_rows_read(p);
}

}  // namespace moe_ep::one_sided
