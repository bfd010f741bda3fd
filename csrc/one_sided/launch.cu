#include "one_sided/combine_kernels.h"
#include "one_sided/cuda_launch.h"
#include "one_sided/dispatch_direct.h"
#include "one_sided/dispatch_packets.h"
#include "one_sided/dispatch_put.h"
#include "one_sided/fp8_rows.h"
#include "one_sided/launch_step.h"
#include "one_sided/small_steps.h"

namespace moe_ep::one_sided {

cudaError_t launch_dispatch_step(const DispatchParams& p, const CudaContext& context,
                                 cudaError_t (*launch_many)(const DispatchKernelParams&,
                                                            const CudaContext&)) {
  const DispatchKernelParams params = kernel_params(p, context);
  const Geometry& g = p.workspace.geometry;
  if (goes_as_packets(g, p.tokens_per_rank)) return launch_dispatch_packets(params, context);
  if (is_dispatched_directly(g, p.tokens_per_rank, all_payloads_are_aligned(params))) {
    return launch_dispatch_direct(params, context);
  }
  return launch_many(params, context);
}

cudaError_t launch_combine_step(const CombineParams& p, const CudaContext& context,
                                cudaError_t (*launch_many)(const CombineKernelParams&,
                                                           const CudaContext&)) {
  const CombineKernelParams params = kernel_params(p, context);
  const Geometry& g = p.workspace.geometry;
  if (travels_as_fp8(p)) return launch_combine_fp8(params, context);
  if (p.quantized != nullptr) return launch_combine_quantized(params, context);
  if (!p.low_precision && is_pushed(g, p.tokens_per_rank)) {
    return launch_combine_push(params, context);
  }
  // A kernel for both took 0.4 us more at one token and two ranks, 1.0 at four.
  const bool has_direct = !p.reader_quantizes || p.expert_output == nullptr;
  if (has_direct && is_summed_directly(g, p.tokens_per_rank)) {
    return launch_combine_direct(params, context);
  }
  return launch_many(params, context);
}

cudaError_t launch_dispatch(const DispatchParams& p, const CudaContext& context) {
  return launch_dispatch_step(p, context, launch_dispatch_put);
}

cudaError_t launch_combine(const CombineParams& p, const CudaContext& context) {
  return launch_combine_step(p, context, launch_combine_get);
}

}  // namespace moe_ep::one_sided
