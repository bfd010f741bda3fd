#include "cake/combine_bulk.cuh"

#include <algorithm>

#include "cake/combine_kernels.h"
#include "cake/cuda_launch.h"

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

BulkPlan bulk_plan(const CombineKernelParams& p) {
  const auto destinations = static_cast<uint32_t>(p.workspace.max_destinations);
  const uint32_t most =
      std::min(kMaxBulkVectors, kMaxStageBytes / (kStagesPerCta * destinations * kVectorBytes));
  const uint32_t vectors_in_row = vectors_per_row(p);
  const auto parts = static_cast<uint32_t>(divide_up(vectors_in_row, most));
  const auto vectors = static_cast<uint32_t>(divide_up(vectors_in_row, parts));  // even parts
  const auto parts_of_vectors = static_cast<uint32_t>(divide_up(vectors_in_row, vectors));
  return {vectors, vectors * kVectorBytes, parts_of_vectors,
          FastDivider(static_cast<int32_t>(parts_of_vectors))};
}

template <bool kStaged>
cudaError_t launch_bulk(const BulkCombine& params, const CudaContext& context) {
  const CombineKernelParams& p = params.combine;
  int multiprocessors = 0;
  const cudaError_t error = multiprocessor_count(&multiprocessors);
  if (error != cudaSuccess) return error;
  const auto destinations = static_cast<uint32_t>(p.workspace.max_destinations);
  const uint32_t shared =
      std::max(kMinSharedBytes, kStagesPerCta * destinations * params.plan.piece_bytes);
  // Few items are spread over all multiprocessors, a warp of each.
  const uint64_t items = tokens_per_rank(p) * params.plan.parts;
  const int ctas = ctas_for(std::max(items, params.stage.max_items(p)), 1, multiprocessors);
  const LaunchShape shape{ctas, kBulkThreads, static_cast<int>(shared)};
  switch (p.row_type) {
    case RowType::kFloat32:
      return launch(combine_bulk_kernel<RowType::kFloat32, kStaged>, shape, context, params);
    case RowType::kFloat16:
      return launch(combine_bulk_kernel<RowType::kFloat16, kStaged>, shape, context, params);
    case RowType::kBFloat16:
      return launch(combine_bulk_kernel<RowType::kBFloat16, kStaged>, shape, context, params);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_combine_bulk(const CombineKernelParams& p, const CudaContext& context) {
  if (p.pitch > kMaxPitch || p.pitch == 0) return cudaErrorInvalidValue;
  const BulkCombine params{p, StagePlan::of(p, kStageItemShift), bulk_plan(p)};
  if (tokens_per_rank(p) * params.plan.parts > kMaxItems) return cudaErrorInvalidValue;
  return p.expert_output == nullptr ? launch_bulk<false>(params, context)
                                    : launch_bulk<true>(params, context);
}

}  // namespace moe_ep::cake
