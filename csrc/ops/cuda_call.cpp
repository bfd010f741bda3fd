#include "ops/cuda_call.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace moe_ep::ops {
namespace {

using CurrentStream = AOTITorchError (*)(int32_t device, void** stream);

// Only a torch with CUDA has this function, and this library must load under one without: it is
// looked up in the library that torch has loaded already.
CurrentStream find_current_stream() {
  constexpr const char* kName = "aoti_torch_get_current_cuda_stream";
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* found = dlsym(library != nullptr ? library : RTLD_DEFAULT, kName);
  if (found == nullptr) throw std::runtime_error(std::string("this torch has no ") + kName);
  return reinterpret_cast<CurrentStream>(found);
}

cudaStream_t current_stream(int32_t device) {
  static const CurrentStream get = find_current_stream();
  void* stream = nullptr;
  if (get(device, &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("torch has no current CUDA stream of device " +
                             std::to_string(device));
  }
  return static_cast<cudaStream_t>(stream);
}

bool is_being_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // an error that can be forgotten must not be found by the next call
  throw std::runtime_error(std::string(call) + " failed: " + cudaGetErrorName(error) + ", " +
                           cudaGetErrorString(error));
}

CudaCall::CudaCall(const torch::stable::Tensor& tensor)
    : device_(tensor.get_device_index()),
      guard_(device_),
      stream_(current_stream(device_)),
      is_captured_(is_being_captured(stream_)) {}

}  // namespace moe_ep::ops
