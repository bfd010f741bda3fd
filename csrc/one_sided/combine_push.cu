#include "one_sided/combine_push.cuh"

#include <algorithm>

#include "one_sided/combine_kernels.h"
#include "one_sided/combine_plan.h"
#include "one_sided/cuda_launch.h"

namespace moe_ep::one_sided {

cudaError_t launch_combine_push(const CombineKernelParams& p, const CudaContext& context) {
  const PushCombine params = PushCombine::of(p);
  int multiprocessors = 0;
  const cudaError_t error = multiprocessors_to_fill(&multiprocessors);
  if (error != cudaSuccess) return error;
  // Of a rank that has all its tokens: grids are sized by what the ranks share. So many CTAs on
  // each multiprocessor leave room for the grids of the other ranks on a GPU and for the kernel
  // behind this one.
  const uint64_t sums = tokens_per_rank(p) * static_cast<uint64_t>(params.shape.pieces);
  const uint64_t warps = 1 + static_cast<uint64_t>(params.sends()) + sums;
  const LaunchShape shape{ctas_for(warps, kPushWarps, kPushCtasPerSm * multiprocessors),
                          kPushThreads, 0};
  switch (p.row_type) {
    case RowType::kFloat32:
      return launch(combine_push_kernel<RowType::kFloat32>, shape, context, params);
    case RowType::kFloat16:
      return launch(combine_push_kernel<RowType::kFloat16>, shape, context, params);
    case RowType::kBFloat16:
      return launch(combine_push_kernel<RowType::kBFloat16>, shape, context, params);
  }
  return cudaErrorInvalidValue;
}

}  // namespace moe_ep::one_sided
