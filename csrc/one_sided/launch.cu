#include "one_sided/combine_kernels.h"
#include "one_sided/cuda.h"
#include "one_sided/cuda_launch.h"
#include "one_sided/dispatch_direct.h"
#include "one_sided/dispatch_packets.h"
#include "one_sided/dispatch_put.h"
#include "one_sided/paths.h"

namespace moe_ep::one_sided {

cudaError_t launch_dispatch(const DispatchParams& p, const CudaContext& context) {
  const DispatchKernelParams params = kernel_params(p, context);
  switch (
      dispatch_path(p.workspace.geometry, p.tokens_per_rank, all_payloads_are_aligned(params))) {
    case DispatchPath::kPackets:
      return launch_dispatch_packets(params, context);
    case DispatchPath::kDirect:
      return launch_dispatch_direct(params, context);
    case DispatchPath::kPut:
      return launch_dispatch_put(params, context);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_combine(const CombineParams& p, const CudaContext& context) {
  const CombineKernelParams params = kernel_params(p, context);
  if (p.low_precision) return launch_combine_fp8(params, context);
  if (p.quantized != nullptr) return launch_combine_quantized(params, context);
  switch (combine_path(p.workspace.geometry, p.tokens_per_rank)) {
    case CombinePath::kPush:
      return launch_combine_push(params, context);
    case CombinePath::kDirect:
      return launch_combine_direct(params, context);
    case CombinePath::kGet:
      return launch_combine_get(params, context);
  }
  return cudaErrorInvalidValue;
}

}  // namespace moe_ep::one_sided
