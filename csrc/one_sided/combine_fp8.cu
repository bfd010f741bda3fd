#include "one_sided/combine_fp8.cuh"

#include <algorithm>
#include <cstdlib>

#include "one_sided/combine_kernels.h"
#include "one_sided/cuda_launch.h"
#include "one_sided/small_steps.h"

namespace moe_ep::one_sided {
namespace {

// Pieces of an item of a sum, and of a part of a row as a power of two, so that no item lies in two
// parts. Few tokens: many warps for each row. Many: few enough parts for the flags over the link,
// whole lines of scales; few enough items for the counters, short enough for an even end.
constexpr uint32_t kFewPiecesPerItem = 1;
constexpr uint32_t kPiecesPerItem = 2;
constexpr uint32_t kFewPieceShift = 1;  // 2048 elements
constexpr uint32_t kPieceShift = 2;
static_assert((1 << kFewPieceShift) % kFewPiecesPerItem == 0 &&
              (1 << kPieceShift) % kPiecesPerItem == 0);
// Elements of a part are counted in 32 bits.
constexpr int64_t kMaxFp8Elements = int64_t{1} << 30;

uint32_t knob(const char* name, uint32_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : static_cast<uint32_t>(std::atoi(text));
}

uint32_t pieces_per_row(const CombineKernelParams& p) {
  return static_cast<uint32_t>(
      divide_up(static_cast<uint64_t>(p.hidden_size), static_cast<uint64_t>(kFp8PieceElements)));
}

template <bool kQuantized>
cudaError_t launch_fp8(const Fp8Combine& params, const LaunchShape& shape,
                       const CudaContext& context) {
  switch (params.combine.row_type) {
    case RowType::kFloat32:
      return launch(combine_fp8_kernel<RowType::kFloat32, kQuantized>, shape, context, params);
    case RowType::kFloat16:
      return launch(combine_fp8_kernel<RowType::kFloat16, kQuantized>, shape, context, params);
    case RowType::kBFloat16:
      return launch(combine_fp8_kernel<RowType::kBFloat16, kQuantized>, shape, context, params);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_combine_fp8(const CombineKernelParams& p, const CudaContext& context) {
  if (p.hidden_size > kMaxFp8Elements) return cudaErrorInvalidValue;
  int multiprocessors = 0;
  const cudaError_t error = multiprocessors_to_fill(&multiprocessors);
  if (error != cudaSuccess) return error;
  const bool is_small = p.tokens_per_rank <= kMaxDirectTokens;
  const Fp8Row row = Fp8Row::of(p.hidden_size);
  const RowParts parts = RowParts::of(row, is_small ? knob("MOE_EP_FEW_SHIFT", kFewPieceShift) : knob("MOE_EP_SHIFT", kPieceShift));
  const uint32_t per_item = is_small ? knob("MOE_EP_FEW_ITEM", kFewPiecesPerItem) : knob("MOE_EP_ITEM", kPiecesPerItem);
  const uint64_t items = tokens_per_rank(p) * SumPlan::items_per_row(pieces_per_row(p), per_item);
  const bool sums_own_rows = std::getenv("MOE_EP_PUSH_OWN") == nullptr && !reads_come_first(p) &&
                             p.row_type != RowType::kFloat32 && p.expert_output_is_aligned;
  const auto sources = static_cast<uint32_t>(p.workspace.ep_size - (sums_own_rows ? 1 : 0));
  const uint64_t most_parts = tokens_per_rank(p) * uint64_t{sources} * parts.count;
  if (std::max(items, most_parts) > kMaxItems) return cudaErrorInvalidValue;
  // Few are spread over all multiprocessors, a warp of each.
  const int ctas = ctas_for(std::max(items, most_parts), 1, multiprocessors);
  const uint32_t early = knob("MOE_EP_EARLY", kFp8EarlyWarps);
  const uint32_t pushers = knob("MOE_EP_PUSHERS", kFp8SumWarps - early);
  const Fp8Combine params{
      .combine = p,
      .row = row,
      .parts = parts,
      .sources = sources,
      .sums_own_rows = sums_own_rows,
      .by_sources = FastDivider(std::max(static_cast<int32_t>(sources), 1)),
      .pushers =
          Share(static_cast<uint32_t>(most_parts), static_cast<uint32_t>(ctas), pushers, 1),
      .sums = SumPlan(p, pieces_per_row(p), per_item, ctas, early),
      .arrived = RowBlocks::pushed(p),
      .reads_come_first = reads_come_first(p),
      .early = early,
  };
  const LaunchShape shape{ctas, kFp8Threads, 0};
  return p.output_is_quantized ? launch_fp8<true>(params, shape, context)
                               : launch_fp8<false>(params, shape, context);
}

}  // namespace moe_ep::one_sided
