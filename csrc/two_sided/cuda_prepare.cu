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
  const PrepareKernelParams params{device_workspace(p.workspace, p.timeout_sec, context), p,
                                   ExpertPartition(g.num_experts, g.ep_size)};
  return launch(&prepare_kernel, 1, kPrepareThreads, context, params);
}

}  // namespace moe_ep::two_sided
