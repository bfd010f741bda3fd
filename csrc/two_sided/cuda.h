// The two-sided transport between ranks on CUDA devices, as the ops call it. Nothing here waits for
// the device or allocates; what the device finds goes to the status page.
#pragma once

#include <cuda_runtime_api.h>

#include "core/status_page.h"
#include "two_sided/params.h"

namespace moe_ep::two_sided {

// What a launch needs to know besides the arguments that the CPU takes, too.
struct CudaContext {
  cudaStream_t stream;
  StatusPage* page;      // pinned host memory of this workspace
  int32_t max_ctas = 0;  // of a launch; 0: no limit
};

// Slots are copied in chunks; nullptr, or why a geometry cannot have kernels.
const char* reason_against(const Geometry& geometry);

// Zeroes this rank's control state. The other ranks may signal only after all ranks have done this
// and have waited for it.
cudaError_t initialize_on_device(const WorkspaceView& workspace, cudaStream_t stream);

// p.out_headers is not looked at: where the ranks disagree is on the page.
cudaError_t launch_prepare(const PrepareParams& p, const CudaContext& context);
cudaError_t launch_alltoallv(const AlltoallvParams& p, const CudaContext& context);
cudaError_t launch_combine(const CombineParams& p, const CudaContext& context);

}  // namespace moe_ep::two_sided
