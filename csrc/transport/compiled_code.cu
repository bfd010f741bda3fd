#include "transport/compiled_code.h"

#include "transport/device/architecture.cuh"

namespace moe_ep {
namespace {

// As -gencode or -arch has told nvcc, ascending: 900 for 9.0.
constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};

}  // namespace

int code_capability(int device_capability) {
  int newest = 0;
  for (const int architecture : kArchitectures) {
    if (architecture / 10 <= device_capability) newest = architecture / 10;
  }
  return newest;
}

cudaError_t has_programmatic_launch(bool* has) {
  int device = 0;
  int major = 0;
  int minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  *has = code_capability(10 * major + minor) * 10 >= kProgrammaticLaunchArchitecture;
  return error;
}

}  // namespace moe_ep
