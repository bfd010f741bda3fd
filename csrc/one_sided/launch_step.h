// Which way a step goes, and its launch: one table for all backends, which differ only in how they
// move many rows. small_steps.h says which steps are small.
#pragma once

#include "one_sided/cuda.h"
#include "one_sided/cuda_params.h"

namespace moe_ep::one_sided {

// launch_many: of any number of tokens; as those of dispatch_put.h and combine_kernels.h.
cudaError_t launch_dispatch_step(const DispatchParams& p, const CudaContext& context,
                                 cudaError_t (*launch_many)(const DispatchKernelParams&,
                                                            const CudaContext&));
cudaError_t launch_combine_step(const CombineParams& p, const CudaContext& context,
                                cudaError_t (*launch_many)(const CombineKernelParams&,
                                                           const CudaContext&));

}  // namespace moe_ep::one_sided
