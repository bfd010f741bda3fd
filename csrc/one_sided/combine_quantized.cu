#include "one_sided/combine_quantized.cuh"

#include <algorithm>

#include "one_sided/combine_kernels.h"
#include "one_sided/cuda_launch.h"
#include "one_sided/small_steps.h"

namespace moe_ep::one_sided {
namespace {

constexpr uint32_t kStageItemShift = 8;  // 256 chunks
// With many tokens: few enough items for the counter, short enough for an even end (to be
// measured).
constexpr uint32_t kPiecesPerItem = 4;

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
cudaError_t launch_quantized(const QuantizedCombine& params, int ctas, const CudaContext& context) {
  const LaunchShape shape{ctas, kQuantizedThreads, 0};
  switch (params.combine.row_type) {
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
  int multiprocessors = 0;
  const cudaError_t error = multiprocessors_to_fill(&multiprocessors);
  if (error != cudaSuccess) return error;
  const uint32_t per_item = p.tokens_per_rank <= kMaxDirectTokens ? 1 : kPiecesPerItem;
  const uint64_t items = tokens_per_rank(p) * SumPlan::items_per_row(vectors_per_row(p), per_item);
  if (items > kMaxItems) return cudaErrorInvalidValue;
  const StagePlan stage = StagePlan::of(p, kStageItemShift);
  const int ctas = ctas_for(std::max(items, stage.max_items(p)), kQuantizedSumWarps,
                            kQuantizedCtasPerSm * multiprocessors);
  const QuantizedCombine params{p, stage,
                                SumPlan(p, vectors_per_row(p), per_item, ctas, kQuantizedSumWarps)};
  return p.expert_output == nullptr ? launch_quantized<false>(params, ctas, context)
                                    : launch_quantized<true>(params, ctas, context);
}

}  // namespace moe_ep::one_sided
