// What an op on CUDA tensors needs from torch and from the CUDA runtime.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace moe_ep::ops {

// Raises RuntimeError that names the call and the error.
void check_cuda(cudaError_t error, const char* call);

// While it lives, the device of `tensor` is the current one.
class CudaCall {
 public:
  explicit CudaCall(const torch::stable::Tensor& tensor);

  int32_t device() const { return device_; }
  cudaStream_t stream() const { return stream_; }  // torch's current one on that device
  // Whether the stream records a CUDA graph: then the host must not wait, and sees nothing yet.
  bool is_captured() const { return is_captured_; }

 private:
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
  bool is_captured_;
};

}  // namespace moe_ep::ops
