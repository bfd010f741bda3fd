#include "cake/combine_bulk.h"

#include <algorithm>

#include "cake/combine_bulk.cuh"
#include "one_sided/cuda_launch.h"
#include "one_sided/fp8_rows.h"

namespace moe_ep::cake {
namespace {

// Four batches of loads of a warp: few enough items for the counters, many enough for all warps.
constexpr uint32_t kStageItemShift = 10;  // 1024 chunks
// What one CTA may have, less what the kernel declares itself.
constexpr uint32_t kMaxStageBytes = 227 * 1024 - 2048;
// More than half of what a multiprocessor has: one CTA each, also when the grid is launched early
// beside another one.
constexpr uint32_t kMinSharedBytes = 118 * 1024;
constexpr uint32_t kStagesPerCta = kBulkWarps * kBulkStages;
static_assert(kStagesPerCta * kMaxTopK * kVectorBytes <= kMaxStageBytes,
              "a vector of each of a token's rows must fit");

struct PieceShape {
  uint32_t bytes;
  uint32_t parts;  // of a row
};

PieceShape piece_shape(const CombineKernelParams& p) {
  const auto destinations = static_cast<uint32_t>(p.workspace.max_destinations);
  const uint64_t most = std::min<uint32_t>(
      kMaxBulkVectors, kMaxStageBytes / (kStagesPerCta * destinations * kVectorBytes));
  const uint64_t vectors_in_row = vectors_per_row(p);
  const uint64_t vectors = divide_up(vectors_in_row, divide_up(vectors_in_row, most));  // even
  return {static_cast<uint32_t>(vectors) * kVectorBytes,
          static_cast<uint32_t>(divide_up(vectors_in_row, vectors))};
}

BulkPlan bulk_plan(const CombineKernelParams& p, PieceShape shape) {
  const uint32_t last_part = shape.parts - 1;
  return {.piece_bytes = shape.bytes,
          .last_part = last_part,
          .last_bytes = static_cast<uint32_t>(p.pitch - uint64_t{last_part} * shape.bytes),
          .padding = static_cast<uint32_t>(p.pitch - static_cast<uint64_t>(p.row_bytes))};
}

template <RowType kType, PulledRows kRows, bool kAsFp8 = false>
cudaError_t launch_bulk(const BulkCombine& params, int ctas, const CudaContext& context) {
  const CombineKernelParams& p = params.combine;
  const auto destinations = static_cast<uint32_t>(p.workspace.max_destinations);
  const uint32_t shared =
      std::max(kMinSharedBytes, kStagesPerCta * destinations * params.plan.piece_bytes);
  const LaunchShape shape{ctas, kBulkThreads, static_cast<int>(shared)};
  return launch(combine_bulk_kernel<kType, kRows, kAsFp8>, shape, context, params);
}

template <RowType kType>
cudaError_t launch_bulk_of(const BulkCombine& params, int ctas, const CudaContext& context) {
  return params.combine.expert_output == nullptr
             ? launch_bulk<kType, PulledRows::kInPlace>(params, ctas, context)
             : launch_bulk<kType, PulledRows::kStaged>(params, ctas, context);
}

}  // namespace

cudaError_t launch_combine_bulk(const CombineKernelParams& p, const CudaContext& context) {
  if (p.pitch > kMaxPitch || p.pitch == 0) return cudaErrorInvalidValue;
  const StagePlan stage = StagePlan::of(p, kStageItemShift);
  const PieceShape shape = piece_shape(p);
  const uint64_t most_items = tokens_per_rank(p) * shape.parts;
  if (most_items > kMaxItems) return cudaErrorInvalidValue;
  int multiprocessors = 0;
  const cudaError_t error = multiprocessors_to_fill(&multiprocessors);
  if (error != cudaSuccess) return error;
  // Few items are spread over all multiprocessors, a warp of each.
  const int ctas = ctas_for(std::max(most_items, stage.max_items(p)), 1, multiprocessors);
  const ItemPlan items(p, shape.parts, FastDivider(static_cast<int32_t>(shape.parts)));
  const Share share(items.total, static_cast<uint32_t>(ctas), kBulkWarps, kBulkStages);
  const BulkCombine params{p, stage, bulk_plan(p, shape), items, share, RowBlocks(p)};
  if (p.reader_quantizes) {
    return launch_bulk<kQuantizedByReader, PulledRows::kEither, true>(params, ctas, context);
  }
  switch (p.row_type) {
    case RowType::kFloat32:
      return launch_bulk<RowType::kFloat32, PulledRows::kEither>(params, ctas, context);
    case RowType::kFloat16:
      return launch_bulk_of<RowType::kFloat16>(params, ctas, context);
    case RowType::kBFloat16:
      return launch_bulk_of<RowType::kBFloat16>(params, ctas, context);
  }
  return cudaErrorInvalidValue;
}

}  // namespace moe_ep::cake
