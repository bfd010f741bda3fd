// The CUDA driver, found at run time: the build links none, and the import of the library loads
// none.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

namespace moe_ep::memory {

// A call that the driver refused: names the call, the driver's reason and, where there is one, the
// way out.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The entry points that this folder calls. Each has the version whose signature its type gives, so
// that an older or newer driver than the headers' serves as well.
struct CudaDriver {
  PFN_cuGetErrorName_v6000 get_error_name;
  PFN_cuGetErrorString_v6000 get_error_string;
  PFN_cuInit_v2000 init;
  PFN_cuDeviceGet_v2000 device_get;
  PFN_cuDeviceGetCount_v2000 device_get_count;
  PFN_cuDeviceGetName_v2000 device_get_name;
  PFN_cuDeviceGetUuid_v11040 device_get_uuid;
  PFN_cuDeviceGetAttribute_v2000 device_get_attribute;
  PFN_cuDeviceCanAccessPeer_v4000 device_can_access_peer;
  PFN_cuDevicePrimaryCtxRetain_v7000 primary_context_retain;
  PFN_cuCtxPushCurrent_v4000 context_push;
  PFN_cuCtxPopCurrent_v4000 context_pop;
  PFN_cuCtxSynchronize_v2000 context_synchronize;
  PFN_cuStreamCreate_v2000 stream_create;
  PFN_cuStreamSynchronize_v2000 stream_synchronize;
  PFN_cuStreamDestroy_v4000 stream_destroy;
  PFN_cuMemGetInfo_v3020 mem_get_info;
  PFN_cuMemsetD8Async_v3020 mem_set_async;
  PFN_cuMemGetAllocationGranularity_v10020 mem_granularity;
  PFN_cuMemAddressReserve_v10020 mem_address_reserve;
  PFN_cuMemAddressFree_v10020 mem_address_free;
  PFN_cuMemCreate_v10020 mem_create;
  PFN_cuMemRelease_v10020 mem_release;
  PFN_cuMemMap_v10020 mem_map;
  PFN_cuMemUnmap_v10020 mem_unmap;
  PFN_cuMemSetAccess_v10020 mem_set_access;
  PFN_cuMemExportToShareableHandle_v10020 mem_export;
  PFN_cuMemImportFromShareableHandle_v10020 mem_import;
  pid_t process;  // that loaded it

  // "CUDA_ERROR_OUT_OF_MEMORY (out of memory)", and what to do about it.
  std::string describe(CUresult result) const;
  // False in a child that was forked after the driver was loaded. It shares the driver's handles
  // with its parent and must not close them.
  bool in_its_process() const { return getpid() == process; }
  // Throws CudaError unless it is CUDA_SUCCESS. call: the function and what it was asked for.
  void check(CUresult result, const std::string& call) const;
};

// Loads and initialises the driver the first time. Throws std::runtime_error where there is none or
// it has no device; the next call tries again. Never unloaded: memory may be freed at exit.
const CudaDriver& cuda_driver();

// Makes the device's primary context, the one that torch uses, this thread's current one. The
// context is kept for as long as the process lives. Throws std::runtime_error in a forked child.
class CurrentCudaDevice {
 public:
  explicit CurrentCudaDevice(int ordinal);
  CurrentCudaDevice(const CurrentCudaDevice&) = delete;
  CurrentCudaDevice& operator=(const CurrentCudaDevice&) = delete;
  ~CurrentCudaDevice();

 private:
  const CudaDriver& driver_;
};

// The driver's name for the device. Throws CudaError if there is none with this ordinal.
CUdevice cuda_device_handle(int ordinal);

}  // namespace moe_ep::memory
