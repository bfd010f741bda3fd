#include "one_sided/combine_fp8.cuh"

#include <algorithm>

#include "one_sided/combine_kernels.h"
#include "one_sided/cuda_launch.h"
#include "one_sided/small_steps.h"

namespace moe_ep::one_sided {
namespace {

// Few tokens: some batches of loads of a warp, so that few rows are quantised by many warps. Many:
// few enough items for the counters, short enough for an even end (to be measured).
constexpr uint32_t kFewStageItemShift = 4;  // 16 blocks of a scale, 2048 elements
constexpr uint32_t kStageItemShift = 5;
constexpr uint32_t kPiecesPerItem = 4;

uint32_t pieces_per_row(const CombineKernelParams& p) {
  return static_cast<uint32_t>(
      divide_up(static_cast<uint64_t>(p.hidden_size), static_cast<uint64_t>(kFp8PieceElements)));
}

}  // namespace

cudaError_t launch_combine_fp8(const CombineKernelParams& p, const CudaContext& context) {
  if (p.pitch > kMaxPitch) return cudaErrorInvalidValue;
  int multiprocessors = 0;
  const cudaError_t error = multiprocessors_to_fill(&multiprocessors);
  if (error != cudaSuccess) return error;
  const bool is_small = p.tokens_per_rank <= kMaxDirectTokens;
  const uint32_t per_item = is_small ? 1 : kPiecesPerItem;
  const uint64_t items = tokens_per_rank(p) * SumPlan::items_per_row(pieces_per_row(p), per_item);
  if (items > kMaxItems) return cudaErrorInvalidValue;
  const Fp8Row row = Fp8Row::of(p.hidden_size);
  const StagePlan stage =
      StagePlan::of(p, row.num_blocks, is_small ? kFewStageItemShift : kStageItemShift);
  const int ctas =
      ctas_for(std::max(items, stage.max_items(p)), kFp8SumWarps, kFp8CtasPerSm * multiprocessors);
  const Fp8Combine params{p, stage, SumPlan(p, pieces_per_row(p), per_item, ctas, kFp8SumWarps),
                          row};
  const LaunchShape shape{ctas, kFp8Threads, 0};
  switch (p.row_type) {
    case RowType::kFloat32:
      return launch(combine_fp8_kernel<RowType::kFloat32>, shape, context, params);
    case RowType::kFloat16:
      return launch(combine_fp8_kernel<RowType::kFloat16>, shape, context, params);
    case RowType::kBFloat16:
      return launch(combine_fp8_kernel<RowType::kBFloat16>, shape, context, params);
  }
  return cudaErrorInvalidValue;
}

}  // namespace moe_ep::one_sided
