// Dispatch of few tokens on CUDA: rows travel as packets, and their receiver unpacks them.
#pragma once

#include <cuda_runtime_api.h>

#include "one_sided/cuda.h"
#include "one_sided/cuda_params.h"

namespace moe_ep::one_sided {

cudaError_t launch_dispatch_packets(const DispatchKernelParams& params, const CudaContext& context);

}  // namespace moe_ep::one_sided
