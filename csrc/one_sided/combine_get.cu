#include "one_sided/combine_get.cuh"

#include "one_sided/combine_kernels.h"
#include "one_sided/cuda_launch.h"
#include "one_sided/sum_launch.h"

namespace moe_ep::one_sided {
namespace {

// Four batches of loads of a warp: few enough items for the counters, many enough for all warps.
constexpr uint32_t kStageItemShift = 10;  // 1024 chunks
// Whole steps of a warp, of which a row of 7168 elements of 16 bits has seven.
constexpr uint32_t kVectorsPerItem = 8;

template <bool kStaged>
cudaError_t launch_get(const GetCombine& params, int ctas, const CudaContext& context) {
  const LaunchShape shape{ctas, kGetThreads, 0};
  switch (params.combine.row_type) {
    case RowType::kFloat32:
      return launch(combine_get_kernel<RowType::kFloat32, kStaged>, shape, context, params);
    case RowType::kFloat16:
      return launch(combine_get_kernel<RowType::kFloat16, kStaged>, shape, context, params);
    case RowType::kBFloat16:
      return launch(combine_get_kernel<RowType::kBFloat16, kStaged>, shape, context, params);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_combine_get(const CombineKernelParams& p, const CudaContext& context) {
  const SumSizes sizes{
      .stage_item_shift = kStageItemShift,
      .vectors_per_item = kVectorsPerItem,
      .items_per_cta = 1,  // few items are spread over all multiprocessors, a warp of each
      .ctas_per_multiprocessor = kGetCtasPerSm,
      .sum_warps = kGetSumWarps,
  };
  return launch_sums(p, sizes, [&](const StagePlan& stage, const SumPlan& plan, int ctas) {
    const GetCombine params{p, stage, plan};
    return p.expert_output == nullptr ? launch_get<false>(params, ctas, context)
                                      : launch_get<true>(params, ctas, context);
  });
}

}  // namespace moe_ep::one_sided
