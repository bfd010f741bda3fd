// From the arguments that CPU and CUDA share to what kernels get, and how they are launched.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "one_sided/cuda.h"
#include "one_sided/cuda_params.h"
#include "transport/compiled_code.h"

namespace moe_ep::one_sided {

DeviceWorkspace device_workspace(const WorkspaceView& view, int32_t timeout_sec,
                                 const CudaContext& context);
DispatchKernelParams kernel_params(const DispatchParams& p, const CudaContext& context);
CombineKernelParams kernel_params(const CombineParams& p, const CudaContext& context);

// Whether all rows can be read 16 bytes at a time, or in bulk.
inline bool all_payloads_are_aligned(const DispatchKernelParams& p) {
  return std::all_of(p.payload_is_aligned, p.payload_is_aligned + p.num_payloads,
                     [](bool is_aligned) { return is_aligned; });
}

// How many multiprocessors of the current device a grid should fill: less than there are, and under
// MPS less than the process's share.
cudaError_t multiprocessors_to_fill(int* count);

struct LaunchShape {
  int ctas;
  int threads;       // of a CTA
  int shared_bytes;  // dynamic
};

// Launches a kernel that takes one params struct by value. A kernel may use all shared memory of a
// multiprocessor.
template <typename Params>
cudaError_t launch(void (*kernel)(Params), const LaunchShape& shape, const CudaContext& context,
                   const Params& params) {
  if (shape.shared_bytes > 48 * 1024) {
    // A few hundred nanoseconds on the host, none in a captured graph; remembering it per kernel
    // and device would need state that outlives device resets.
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  bool starts_early = context.programmatic_launch;
  if (starts_early) {
    const cudaError_t error = has_programmatic_launch(&starts_early);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.ctas));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = context.stream;
  config.attrs = &attribute;
  config.numAttrs = starts_early ? 1 : 0;
  Params copy = params;
  void* arguments[] = {&copy};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

}  // namespace moe_ep::one_sided
