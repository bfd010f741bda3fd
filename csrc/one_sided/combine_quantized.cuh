// Combine with sums in a block-scaled format. A warp sums 512 bytes of a token's rows as
// combine_direct does, any number of tokens; the lanes that share a scale block agree on its
// scale.
#pragma once

#include <cstdint>

#include "one_sided/combine_plan.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/combine_enter.cuh"
#include "one_sided/device/item_feed.cuh"
#include "one_sided/device/quantize_sums.cuh"
#include "one_sided/device/sum_items.cuh"
#include "one_sided/device/token_rows.cuh"
#include "transport/device/row_sum.cuh"

namespace moe_ep::one_sided {

// Seven warps sum, and one speaks with the peers.
inline constexpr int kQuantizedThreads = 256;
inline constexpr uint32_t kQuantizedSumWarps = kQuantizedThreads / kWarpSize - 1;
inline constexpr int kQuantizedCtasPerSm = 2;  // to be measured

struct QuantizedCombine {
  CombineKernelParams combine;
  StagePlan stage;
  SumPlan plan;  // a piece is 512 bytes of the rows that are summed
};

template <RowType kType>
__device__ void quantize_item(const QuantizedCombine& c, const Item& item, bool valid) {
  const CombineKernelParams& p = c.combine;
  const uint32_t first = item.part * c.plan.pieces_per_item;
  const uint32_t end = min(first + c.plan.pieces_per_item, c.plan.pieces_per_row);
  const int64_t num_blocks = scales_per_row(p.quantized.format, p.hidden_size);
  const ScaleRow scales = scales_of_row(p.quantized.layout, item.token, num_blocks);
  const TokenRows rows = locate_rows(p, item.slot);
  for (uint32_t piece = first; piece < end; ++piece) {
    const int64_t chunk = static_cast<int64_t>(piece) * kWarpSize + lane_id();
    // Lanes behind the end of the row read its last chunk.
    const uint64_t last_chunk = p.pitch - kRowAlignment;
    const uint64_t offset = min(static_cast<uint64_t>(chunk) * kRowAlignment, last_chunk);
    float sum[Chunk<kType>::kElements];
    start(sum, valid);
    if (valid) add_rows<kType>(sum, rows, offset);
    store_quantized_as(p.quantized, item.token, scales, chunk, sum);
  }
  if (end == c.plan.pieces_per_row) clear_scales_behind_row(p.quantized, scales, num_blocks);
}

template <RowType kType, bool kStaged>
__global__ void __launch_bounds__(kQuantizedThreads, kQuantizedCtasPerSm)
    combine_quantized_kernel(const __grid_constant__ QuantizedCombine c) {
  const CombineKernelParams& p = c.combine;
  begin_combine<kStaged>(p, c.stage);
  const auto clear_padding = [&] {
    clear_padding_scales<kQuantizedSumWarps>(p.quantized,
                                             scales_per_row(p.quantized.format, p.hidden_size));
  };
  const auto sum = [&](const Item& item, bool valid) { quantize_item<kType>(c, item, valid); };
  sum_items<kQuantizedSumWarps, kStaged>(p, c.plan, clear_padding, sum);
}

}  // namespace moe_ep::one_sided
