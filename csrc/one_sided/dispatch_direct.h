// Launches the dispatch whose rows are stored in place from registers, see dispatch_direct.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "one_sided/cuda.h"
#include "one_sided/cuda_params.h"

namespace moe_ep::one_sided {

// For what is_dispatched_directly. One kernel; two if p.out_topk_ids or p.out_topk_weights are
// not in the own segment.
cudaError_t launch_dispatch_direct(const DispatchKernelParams& p, const CudaContext& context);

}  // namespace moe_ep::one_sided
