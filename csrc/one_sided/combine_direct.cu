#include "one_sided/combine_direct.cuh"

#include <algorithm>

#include "one_sided/combine_kernels.h"
#include "one_sided/cuda_launch.h"
#include "one_sided/fp8_rows.h"

namespace moe_ep::one_sided {
namespace {

// One batch of loads of a warp, so that few rows are staged by many warps.
constexpr uint32_t kStageItemShift = 8;  // 256 chunks

template <RowType kType, PulledRows kRows, bool kAsFp8 = false>
cudaError_t launch_direct(const DirectCombine& params, const CudaContext& context) {
  const CombineKernelParams& p = params.combine;
  int multiprocessors = 0;
  const cudaError_t error = multiprocessors_to_fill(&multiprocessors);
  if (error != cudaSuccess) return error;
  const uint64_t pieces = tokens_per_rank(p) * params.pieces_per_row;
  const int ctas = ctas_for(std::max(pieces, params.stage.max_items(p)), kDirectSumWarps,
                            kDirectCtasPerSm<kRows> * multiprocessors);
  const LaunchShape shape{ctas, kDirectThreads, 0};
  return launch(combine_direct_kernel<kType, kRows, kAsFp8>, shape, context, params);
}

template <RowType kType>
cudaError_t launch_direct_of(const DirectCombine& params, const CudaContext& context) {
  return params.combine.expert_output == nullptr
             ? launch_direct<kType, PulledRows::kInPlace>(params, context)
             : launch_direct<kType, PulledRows::kStaged>(params, context);
}

}  // namespace

cudaError_t launch_combine_direct(const CombineKernelParams& p, const CudaContext& context) {
  const uint32_t pieces_per_row = vectors_per_row(p);
  if (p.pitch > kMaxPitch || tokens_per_rank(p) * pieces_per_row > kMaxItems) {
    return cudaErrorInvalidValue;
  }
  const DirectCombine params{p, StagePlan::of(p, kStageItemShift), pieces_per_row,
                             FastDivider(std::max(static_cast<int32_t>(pieces_per_row), 1))};
  if (p.reader_quantizes) {
    return launch_direct<kQuantizedByReader, PulledRows::kInPlace, true>(params, context);
  }
  switch (p.row_type) {
    case RowType::kFloat32:
      return launch_direct<RowType::kFloat32, PulledRows::kEither>(params, context);
    case RowType::kFloat16:
      return launch_direct_of<RowType::kFloat16>(params, context);
    case RowType::kBFloat16:
      return launch_direct_of<RowType::kBFloat16>(params, context);
  }
  return cudaErrorInvalidValue;
}

}  // namespace moe_ep::one_sided
