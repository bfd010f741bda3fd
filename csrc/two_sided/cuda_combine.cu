#include "two_sided/cuda_combine.cuh"

#include <limits>

#include "two_sided/cuda_launch.h"

namespace moe_ep::two_sided {
namespace {

template <RowType kType>
cudaError_t launch_combine_of(const CombineKernelParams& k, const CudaContext& context) {
  const auto kernel = k.workspace.view.geometry.ep_size <= kWarpSize
                          ? &combine_kernel<kType, 1>
                          : &combine_kernel<kType, kMaxEpSize / kWarpSize>;
  return launch(kernel, ctas_for(k.plan, k.shape, context), kCtaThreads, context, k);
}

}  // namespace

cudaError_t launch_combine(const CombineParams& p, const CudaContext& context) {
  const Geometry& g = p.workspace.geometry;
  const int64_t row_bytes = p.hidden_size * row_type_bytes(p.row_type);
  if (chunks_of(row_bytes) >= std::numeric_limits<int32_t>::max() / 2) return cudaErrorInvalidValue;
  CombineKernelParams k{};
  k.workspace = device_workspace(p.workspace, p.timeout_sec, context);
  k.plan = StreamPlan::of(g, 1, static_cast<int32_t>(chunks_of(row_bytes)), p.tokens_per_rank);
  k.shape = CtaShape::of_combine();
  k.num_tokens = p.num_tokens;
  k.tokens_per_rank = p.tokens_per_rank;
  k.signature = hash_of({2, {static_cast<int64_t>(p.row_type), p.hidden_size}});
  k.send_tokens = p.send_tokens;
  k.expert_rows = field_rows(p.expert_output.data, p.expert_output.stride, row_bytes, 0);
  k.output = p.output;
  k.output_is_whole = field_rows(p.output, row_bytes, row_bytes, 0).is_whole;
  switch (p.row_type) {
    case RowType::kFloat32:
      return launch_combine_of<RowType::kFloat32>(k, context);
    case RowType::kFloat16:
      return launch_combine_of<RowType::kFloat16>(k, context);
    case RowType::kBFloat16:
      return launch_combine_of<RowType::kBFloat16>(k, context);
  }
  return cudaErrorInvalidValue;
}

}  // namespace moe_ep::two_sided
