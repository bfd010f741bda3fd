// Launches the dispatch of any number of tokens that needs no copy engine, see dispatch_put.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "one_sided/cuda.h"
#include "one_sided/cuda_params.h"

namespace moe_ep::one_sided {

// One kernel; two if p.out_topk_ids or p.out_topk_weights are not in the own segment.
cudaError_t launch_dispatch_put(const DispatchKernelParams& p, const CudaContext& context);

}  // namespace moe_ep::one_sided
