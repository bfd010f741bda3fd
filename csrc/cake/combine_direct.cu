#include "cake/combine_direct.cuh"

#include <algorithm>

#include "cake/combine_kernels.h"
#include "cake/cuda_launch.h"

namespace moe_ep::cake {
namespace {

// One batch of loads of a warp, so that few rows are staged by many warps.
constexpr uint32_t kStageChunks = 256;

}  // namespace

cudaError_t launch_combine_direct(const CombineKernelParams& p, const CudaContext& context) {
  if (p.pitch > kMaxPitch) return cudaErrorInvalidValue;
  const DirectCombine params{p, StagePlan::of(p, kStageChunks), vectors_per_row(p)};
  const uint64_t pieces = tokens_per_rank(p) * params.pieces_per_row;
  if (pieces > kMaxItems) return cudaErrorInvalidValue;
  int multiprocessors = 0;
  const cudaError_t error = multiprocessor_count(&multiprocessors);
  if (error != cudaSuccess) return error;
  const int ctas = ctas_for(std::max(pieces, params.stage.max_items(p)), kDirectThreads / 32,
                            kDirectCtasPerSm * multiprocessors);
  const LaunchShape shape{ctas, kDirectThreads, 0};
  switch (p.row_type) {
    case RowType::kFloat32:
      return launch(combine_direct_kernel<RowType::kFloat32>, shape, context, params);
    case RowType::kFloat16:
      return launch(combine_direct_kernel<RowType::kFloat16>, shape, context, params);
    case RowType::kBFloat16:
      return launch(combine_direct_kernel<RowType::kBFloat16>, shape, context, params);
  }
  return cudaErrorInvalidValue;
}

}  // namespace moe_ep::cake
