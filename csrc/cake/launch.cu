#include <cstdlib>

#include "cake/combine_bulk.h"
#include "cake/cuda.h"
#include "cake/dispatch_bulk.h"
#include "one_sided/combine_kernels.h"
#include "one_sided/cuda_launch.h"
#include "one_sided/launch_step.h"
#include "one_sided/small_steps.h"

namespace moe_ep::cake {

cudaError_t launch_dispatch(const DispatchParams& p, const CudaContext& context) {
  return launch_dispatch_step(p, context, launch_dispatch_bulk);
}

cudaError_t launch_combine(const CombineParams& p, const CudaContext& context) {
  // One GPU: no link to save bytes on, so rows stay as they are, and who sums them quantises them.
  static const bool pulls = std::getenv("MOE_EP_PUSH") == nullptr;
  if (pulls && p.low_precision && p.quantized == nullptr && p.workspace.geometry.spans_gpus == 0) {
    CombineParams whole = p;
    whole.low_precision = false;
    one_sided::CombineKernelParams params = one_sided::kernel_params(whole, context);
    params.signature ^= 0x5A5A5A5A;
    params.sums_as_fp8 = true;
    return one_sided::is_summed_directly(p.workspace.geometry, p.tokens_per_rank)
               ? one_sided::launch_combine_direct(params, context)
               : launch_combine_bulk(params, context);
  }
  return launch_combine_step(p, context, launch_combine_bulk);
}

}  // namespace moe_ep::cake
