#include "cake/combine_quantized.cuh"

#include <algorithm>

#include "cake/combine_kernels.h"
#include "cake/cuda_launch.h"
#include "cake/paths.h"

namespace moe_ep::cake {
namespace {

constexpr uint32_t kStageItemShift = 8;  // 256 chunks  // as in combine_direct
// With many tokens: few enough items for the counter, short enough for an even end (to be
// measured).
constexpr uint32_t kPiecesPerItem = 4;

QuantizedPlan quantized_plan(const CombineKernelParams& p) {
  const uint32_t pieces = vectors_per_row(p);
  const uint32_t per_item = p.tokens_per_rank <= kMaxDirectTokens ? 1 : kPiecesPerItem;
  const auto items = static_cast<uint32_t>(divide_up(pieces, per_item));
  return {pieces, per_item, items, FastDivider(std::max(static_cast<int32_t>(items), 1))};
}

template <RowType kType, bool kStaged>
cudaError_t launch_with_rows(const QuantizedCombine& params, const LaunchShape& shape,
                             const CudaContext& context) {
  switch (params.combine.quantized.format) {
    case QuantFormat::kMxfp8:
      return launch(combine_quantized_kernel<kType, QuantFormat::kMxfp8, kStaged>, shape, context,
                    params);
    case QuantFormat::kMxfp4:
      return launch(combine_quantized_kernel<kType, QuantFormat::kMxfp4, kStaged>, shape, context,
                    params);
    case QuantFormat::kNvfp4:
      return launch(combine_quantized_kernel<kType, QuantFormat::kNvfp4, kStaged>, shape, context,
                    params);
  }
  return cudaErrorInvalidValue;
}

template <bool kStaged>
cudaError_t launch_quantized(const QuantizedCombine& params, const CudaContext& context) {
  const CombineKernelParams& p = params.combine;
  int multiprocessors = 0;
  const cudaError_t error = multiprocessors_to_fill(&multiprocessors);
  if (error != cudaSuccess) return error;
  const uint64_t items = tokens_per_rank(p) * params.plan.items_per_row;
  const int ctas = ctas_for(std::max(items, params.stage.max_items(p)), kQuantizedSumWarps,
                            kQuantizedCtasPerSm * multiprocessors);
  const LaunchShape shape{ctas, kQuantizedThreads, 0};
  switch (p.row_type) {
    case RowType::kFloat32:
      return launch_with_rows<RowType::kFloat32, kStaged>(params, shape, context);
    case RowType::kFloat16:
      return launch_with_rows<RowType::kFloat16, kStaged>(params, shape, context);
    case RowType::kBFloat16:
      return launch_with_rows<RowType::kBFloat16, kStaged>(params, shape, context);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_combine_quantized(const CombineKernelParams& p, const CudaContext& context) {
  if (p.pitch > kMaxPitch) return cudaErrorInvalidValue;
  const QuantizedCombine params{p, StagePlan::of(p, kStageItemShift), quantized_plan(p)};
  if (tokens_per_rank(p) * params.plan.items_per_row > kMaxItems) return cudaErrorInvalidValue;
  return p.expert_output == nullptr ? launch_quantized<false>(params, context)
                                    : launch_quantized<true>(params, context);
}

}  // namespace moe_ep::cake
