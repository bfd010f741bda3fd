// The rounds of nvlink_one_sided on CUDA devices, as the ops call them. Nothing here waits for the
// device or allocates; what the device finds goes to the status page.
#pragma once

#include <cuda_runtime_api.h>

#include "core/status_page.h"
#include "one_sided/params.h"

namespace moe_ep::one_sided {

// What a launch needs to know besides the arguments that the CPU takes, too.
struct CudaContext {
  cudaStream_t stream;
  StatusPage* page;                  // pinned host memory of this workspace
  const uint64_t* active_on_device;  // rank mask in device memory; null: params.active
  // Whether a kernel may start while the one before it on the stream still runs, if it can.
  bool programmatic_launch;
};

// Zeroes this rank's control state and packets. The other ranks may signal only after all ranks
// have done this and have waited for it.
cudaError_t initialize_on_device(const WorkspaceView& workspace, cudaStream_t stream);

// Behind the last combine: tells the page if a rank of its round has gone on without this one while
// it was reading.
cudaError_t launch_look_around(const WorkspaceView& workspace, StatusPage* page,
                               cudaStream_t stream);

// p.out_* may point into the own segment (then nothing is copied) or to fresh tensors. One kernel;
// two, if many tokens' ids go to fresh tensors.
cudaError_t launch_dispatch(const DispatchParams& p, const CudaContext& context);

// One kernel. p.active is not looked at: the mask of the dispatch counts.
cudaError_t launch_combine(const CombineParams& p, const CudaContext& context);

}  // namespace moe_ep::one_sided
