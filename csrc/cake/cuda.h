// Cake's rounds on CUDA devices, as the ops call them: the one-sided transport, and bulk copies for
// many rows.
#pragma once

#include <cuda_runtime_api.h>

#include "one_sided/cuda.h"

namespace moe_ep::cake {

// As those of one_sided/cuda.h.
cudaError_t launch_dispatch(const one_sided::DispatchParams& p,
                            const one_sided::CudaContext& context);
cudaError_t launch_combine(const one_sided::CombineParams& p,
                           const one_sided::CudaContext& context);

}  // namespace moe_ep::cake
