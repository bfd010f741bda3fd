// Combine of many tokens without a copy engine: each warp gets some vectors of all of a token's
// rows into registers, all at once, and sums them from there. Items come from a counter.
#pragma once

#include <cstdint>

#include "one_sided/combine_plan.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/combine_enter.cuh"
#include "one_sided/device/item_feed.cuh"
#include "one_sided/device/sum_items.cuh"
#include "one_sided/device/token_rows.cuh"
#include "one_sided/device/vector_run.cuh"

namespace moe_ep::one_sided {

// Seven warps sum, and one speaks with the peers.
inline constexpr int kGetThreads = 256;
inline constexpr uint32_t kGetSumWarps = kGetThreads / kWarpSize - 1;
// 14 warps with up to 16 vectors on their way each: 112 KiB a multiprocessor. To be measured.
inline constexpr int kGetCtasPerSm = 2;

struct GetCombine {
  CombineKernelParams combine;
  StagePlan stage;
  SumPlan plan;  // a piece is a vector
};

template <RowType kType>
__device__ void get_item(const GetCombine& c, const Item& item, bool valid, uint4* scratch) {
  constexpr int kMostRows = 8;
  const CombineKernelParams& p = c.combine;
  const uint32_t first = item.part * c.plan.pieces_per_item;
  const uint32_t end = min(first + c.plan.pieces_per_item, c.plan.pieces_per_row);
  VectorRun run(p, item.token, first, end);
  const TokenRows rows = locate_rows(p, item.slot);
  const bool are_few = rows.count > 0 && rows.count <= kMostRows;
  if (valid && are_few && p.output_is_aligned) get_counted_rows<kType, 1, kMostRows>(run, rows);
  get_one_by_one<kType>(p, run, rows, valid, scratch);
}

template <RowType kType, bool kStaged>
__global__ void __launch_bounds__(kGetThreads, kGetCtasPerSm)
    combine_get_kernel(const __grid_constant__ GetCombine c) {
  __shared__ uint4 scratch[kGetThreads];
  uint4* const own_scratch = scratch + threadIdx.x / kWarpSize * kWarpSize;
  begin_combine<kStaged>(c.combine, c.stage);
  const auto sum = [&](const Item& item, bool valid) {
    get_item<kType>(c, item, valid, own_scratch);
  };
  sum_items<kGetSumWarps, kStaged>(c.combine, c.plan, [] {}, sum);
}

}  // namespace moe_ep::one_sided
