// Launches the combine of many tokens, whose rows come through shared memory, by the copy engine.
#pragma once

#include <cuda_runtime_api.h>

#include "cake/namespace.h"
#include "one_sided/cuda.h"
#include "one_sided/cuda_params.h"

namespace moe_ep::cake {

// As those of one_sided/combine_kernels.h.
cudaError_t launch_combine_bulk(const CombineKernelParams& p, const CudaContext& context);

}  // namespace moe_ep::cake
