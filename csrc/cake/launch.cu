#include "cake/combine_bulk.h"
#include "cake/cuda.h"
#include "cake/dispatch_bulk.h"
#include "one_sided/launch_step.h"

namespace moe_ep::cake {

cudaError_t launch_dispatch(const DispatchParams& p, const CudaContext& context) {
  return launch_dispatch_step(p, context, launch_dispatch_bulk);
}

cudaError_t launch_combine(const CombineParams& p, const CudaContext& context) {
  return launch_combine_step(p, context, launch_combine_bulk);
}

}  // namespace moe_ep::cake
