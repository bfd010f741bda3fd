// Dispatch of few tokens on CUDA: rows travel as packets, and their receiver unpacks them.
#pragma once

#include <cuda_runtime_api.h>

#include "cake/cuda.h"
#include "cake/cuda_params.h"

namespace moe_ep::cake {

cudaError_t launch_dispatch_packets(const DispatchKernelParams& params, const CudaContext& context);

}  // namespace moe_ep::cake
