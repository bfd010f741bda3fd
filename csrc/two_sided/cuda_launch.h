// From the arguments that CPU and CUDA share to what kernels get, and how they are launched.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "transport/compiled_code.h"
#include "two_sided/cuda.h"
#include "two_sided/cuda_params.h"

namespace moe_ep::two_sided {

inline DeviceWorkspace device_workspace(const WorkspaceView& view, int32_t timeout_sec,
                                        const CudaContext& context) {
  DeviceWorkspace w{};
  w.view = view;
  w.layout = FifoLayout::of(view.geometry);
  w.page = context.page;
  w.timeout_ns = static_cast<uint64_t>(timeout_sec) * 1'000'000'000u;
  w.timeout_sec = timeout_sec;
  w.reach = view.geometry.spans_gpus != 0 ? Reach::kSystem : Reach::kGpu;
  return w;
}

inline FieldRows field_rows(const uint8_t* data, int64_t stride, int64_t row_bytes, int64_t begin) {
  const uint64_t bits = reinterpret_cast<uint64_t>(data) | static_cast<uint64_t>(stride) |
                        static_cast<uint64_t>(row_bytes);
  return {const_cast<uint8_t*>(data), stride, row_bytes, static_cast<int32_t>(begin),
          bits % kRowAlignment == 0};
}

// As many CTAs as there are groups of channels, so that none waits for another to end.
inline int ctas_for(const StreamPlan& plan, const CtaShape& shape, const CudaContext& context) {
  const int32_t groups = shape.groups(plan);
  return context.max_ctas == 0 ? groups : std::min(groups, context.max_ctas);
}

// What comes before a kernel on its stream.
enum class Behind { kAnything, kPrepare };

// Launches a kernel that takes one params struct by value. Behind prepare it begins as soon as that
// allows it, and waits for the end of it itself.
template <typename Params>
cudaError_t launch(void (*kernel)(Params), int ctas, int threads, const CudaContext& context,
                   const Params& params, Behind behind = Behind::kAnything) {
  bool starts_early = behind == Behind::kPrepare;
  if (starts_early) {
    const cudaError_t error = has_programmatic_launch(&starts_early);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.attrs = &attribute;
  config.numAttrs = starts_early ? 1 : 0;
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = context.stream;
  Params copy = params;
  void* arguments[] = {&copy};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

}  // namespace moe_ep::two_sided
