#include "one_sided/combine_direct.cuh"

#include <algorithm>

#include "one_sided/combine_kernels.h"
#include "one_sided/cuda_launch.h"

namespace moe_ep::one_sided {
namespace {

// One batch of loads of a warp, so that few rows are staged by many warps.
constexpr uint32_t kStageItemShift = 8;  // 256 chunks

template <bool kStaged, bool kAsFp8>
cudaError_t launch_direct(const DirectCombine& params, const CudaContext& context) {
  const CombineKernelParams& p = params.combine;
  int multiprocessors = 0;
  const cudaError_t error = multiprocessors_to_fill(&multiprocessors);
  if (error != cudaSuccess) return error;
  const uint64_t pieces = tokens_per_rank(p) * params.pieces_per_row;
  const int ctas = ctas_for(std::max(pieces, params.stage.max_items(p)), kDirectSumWarps,
                            kDirectCtasPerSm<kStaged> * multiprocessors);
  const LaunchShape shape{ctas, kDirectThreads, 0};
  switch (p.row_type) {
    case RowType::kFloat32:
      return launch(combine_direct_kernel<RowType::kFloat32, kStaged, kAsFp8>, shape, context, params);
    case RowType::kFloat16:
      return launch(combine_direct_kernel<RowType::kFloat16, kStaged, kAsFp8>, shape, context, params);
    case RowType::kBFloat16:
      return launch(combine_direct_kernel<RowType::kBFloat16, kStaged, kAsFp8>, shape, context, params);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_combine_direct(const CombineKernelParams& p, const CudaContext& context) {
  const uint32_t pieces_per_row = vectors_per_row(p);
  if (p.pitch > kMaxPitch || tokens_per_rank(p) * pieces_per_row > kMaxItems) {
    return cudaErrorInvalidValue;
  }
  const DirectCombine params{p, StagePlan::of(p, kStageItemShift), pieces_per_row,
                             FastDivider(std::max(static_cast<int32_t>(pieces_per_row), 1))};
  if (p.sums_as_fp8) {
    return p.expert_output == nullptr ? launch_direct<false, true>(params, context)
                                      : launch_direct<true, true>(params, context);
  }
  return p.expert_output == nullptr ? launch_direct<false, false>(params, context)
                                    : launch_direct<true, false>(params, context);
}

}  // namespace moe_ep::one_sided
