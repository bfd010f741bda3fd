#include "one_sided/combine_quantized.cuh"

#include "one_sided/combine_kernels.h"
#include "one_sided/cuda_launch.h"
#include "one_sided/small_steps.h"
#include "one_sided/sum_launch.h"

namespace moe_ep::one_sided {
namespace {

constexpr uint32_t kStageItemShift = 8;  // 256 chunks
// With many tokens: few enough items for the counter, short enough for an even end (to be
// measured).
constexpr uint32_t kPiecesPerItem = 4;

template <bool kStaged>
cudaError_t launch_quantized(const QuantizedCombine& params, int ctas, const CudaContext& context) {
  const LaunchShape shape{ctas, kQuantizedThreads, 0};
  switch (params.combine.row_type) {
    case RowType::kFloat32:
      return launch(combine_quantized_kernel<RowType::kFloat32, kStaged>, shape, context, params);
    case RowType::kFloat16:
      return launch(combine_quantized_kernel<RowType::kFloat16, kStaged>, shape, context, params);
    case RowType::kBFloat16:
      return launch(combine_quantized_kernel<RowType::kBFloat16, kStaged>, shape, context, params);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_combine_quantized(const CombineKernelParams& p, const CudaContext& context) {
  const SumSizes sizes{
      .stage_item_shift = kStageItemShift,
      .vectors_per_item = p.tokens_per_rank <= kMaxDirectTokens ? 1 : kPiecesPerItem,
      .items_per_cta = kQuantizedSumWarps,
      .ctas_per_multiprocessor = kQuantizedCtasPerSm,
      .sum_warps = kQuantizedSumWarps,
  };
  return launch_sums(p, sizes, [&](const StagePlan& stage, const SumPlan& plan, int ctas) {
    const QuantizedCombine params{p, stage, plan};
    return p.expert_output == nullptr ? launch_quantized<false>(params, ctas, context)
                                      : launch_quantized<true>(params, ctas, context);
  });
}

}  // namespace moe_ep::one_sided
