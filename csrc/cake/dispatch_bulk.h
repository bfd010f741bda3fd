// Launches the dispatch whose rows are stored in place, see dispatch_bulk.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "cake/namespace.h"
#include "one_sided/cuda.h"
#include "one_sided/cuda_params.h"

namespace moe_ep::cake {

// One kernel; two if p.out_topk_ids or p.out_topk_weights are not in the own segment.
cudaError_t launch_dispatch_bulk(const DispatchKernelParams& p, const CudaContext& context);

}  // namespace moe_ep::cake
