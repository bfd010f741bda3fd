#include "two_sided/cuda_prepare.cuh"

#include "two_sided/cuda_launch.h"

namespace moe_ep::two_sided {

const char* reason_against(const Geometry& geometry) {
  return geometry.slot_bytes % static_cast<int64_t>(kRowAlignment) == 0
             ? nullptr
             : "slot_bytes must be a multiple of 16 on CUDA devices";
}

cudaError_t initialize_on_device(const WorkspaceView& workspace, cudaStream_t stream) {
  const FifoLayout layout = FifoLayout::of(workspace.geometry);
  return cudaMemsetAsync(workspace.segment(workspace.ep_rank), 0, layout.end_of_control(), stream);
}

cudaError_t launch_prepare(const PrepareParams& p, const CudaContext& context) {
  const Geometry& g = p.workspace.geometry;
  constexpr int32_t kVector = sizeof(uint4);
  const int32_t ids_bytes = g.top_k * (p.ids_are_int64 ? 8 : 4);
  const bool in_vectors =
      ids_bytes % kVector == 0 && reinterpret_cast<uint64_t>(p.topk_ids) % kVector == 0;
  const PrepareKernelParams params{device_workspace(p.workspace, p.timeout_sec, context), p,
                                   ExpertPartition(g.num_experts, g.ep_size),
                                   static_cast<const uint4*>(p.topk_ids),
                                   in_vectors ? ids_bytes / kVector : 0};
  const int ctas = std::max((p.num_tokens + kSliceTokens - 1) / kSliceTokens, 1);
  return launch(&prepare_kernel, ctas, kPrepareThreads, context, params);
}

}  // namespace moe_ep::two_sided
