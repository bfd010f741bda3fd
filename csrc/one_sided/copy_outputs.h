// Launches the copy of received ids and weights to tensors of their own.
#pragma once

#include <cuda_runtime_api.h>

#include "one_sided/cuda.h"
#include "one_sided/cuda_params.h"

namespace moe_ep::one_sided {

// Behind a dispatch that leaves ids and weights in the own segment. Nothing is launched if
// p.out_topk_ids and p.out_topk_weights are there.
cudaError_t launch_copy_outputs(const DispatchKernelParams& p, const CudaContext& context);

}  // namespace moe_ep::one_sided
