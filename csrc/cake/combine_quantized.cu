#include "cake/combine_quantized.cuh"

#include <algorithm>

#include "cake/combine_kernels.h"
#include "cake/cuda_launch.h"
#include "cake/paths.h"

namespace moe_ep::cake {
namespace {

constexpr uint32_t kStageChunks = 256;  // as in combine_direct
// With many tokens: few enough items for the counter, short enough for an even end (to be
// measured).
constexpr uint32_t kPiecesPerItem = 4;

QuantizedPlan quantized_plan(const CombineKernelParams& p) {
  const uint32_t pieces = vectors_per_row(p);
  const uint32_t per_item = p.tokens_per_rank <= kMaxDirectTokens ? 1 : kPiecesPerItem;
  return {pieces, per_item, static_cast<uint32_t>(divide_up(pieces, per_item))};
}

template <RowType kType>
cudaError_t launch_with_rows(const QuantizedCombine& params, const LaunchShape& shape,
                             const CudaContext& context) {
  switch (params.combine.quantized.format) {
    case QuantFormat::kMxfp8:
      return launch(combine_quantized_kernel<kType, QuantFormat::kMxfp8>, shape, context, params);
    case QuantFormat::kMxfp4:
      return launch(combine_quantized_kernel<kType, QuantFormat::kMxfp4>, shape, context, params);
    case QuantFormat::kNvfp4:
      return launch(combine_quantized_kernel<kType, QuantFormat::kNvfp4>, shape, context, params);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_combine_quantized(const CombineKernelParams& p, const CudaContext& context) {
  if (p.pitch > kMaxPitch) return cudaErrorInvalidValue;
  const QuantizedCombine params{p, StagePlan::of(p, kStageChunks), quantized_plan(p)};
  const uint64_t items = tokens_per_rank(p) * params.plan.items_per_row;
  if (items > kMaxItems) return cudaErrorInvalidValue;
  int multiprocessors = 0;
  const cudaError_t error = multiprocessor_count(&multiprocessors);
  if (error != cudaSuccess) return error;
  const int ctas = ctas_for(std::max(items, params.stage.max_items(p)), kQuantizedThreads / 32,
                            kQuantizedCtasPerSm * multiprocessors);
  const LaunchShape shape{ctas, kQuantizedThreads, 0};
  switch (p.row_type) {
    case RowType::kFloat32:
      return launch_with_rows<RowType::kFloat32>(params, shape, context);
    case RowType::kFloat16:
      return launch_with_rows<RowType::kFloat16>(params, shape, context);
    case RowType::kBFloat16:
      return launch_with_rows<RowType::kBFloat16>(params, shape, context);
  }
  return cudaErrorInvalidValue;
}

}  // namespace moe_ep::cake
