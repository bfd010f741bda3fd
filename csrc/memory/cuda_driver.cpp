#include "memory/cuda_driver.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace moe_ep::memory {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

// Finds one entry point after the other.
class Lookup {
 public:
  Lookup() {
    void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* reason = dlerror();
      throw std::runtime_error("there is no CUDA driver (" +
                               std::string(reason != nullptr ? reason : kLibrary) +
                               "). Install NVIDIA's driver, or start the container with its GPUs");
    }
    // Version 2 came with CUDA 12.0.
    get_ = reinterpret_cast<PFN_cuGetProcAddress_v12000>(dlsym(library, "cuGetProcAddress_v2"));
    if (get_ == nullptr) {
      throw std::runtime_error("the CUDA driver is older than 12.0. Install a newer one");
    }
  }

  template <typename Function>
  void operator()(Function& entry, const char* name, int version) const {
    void* address = nullptr;
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    const CUresult result = get_(name, &address, version, CU_GET_PROC_ADDRESS_DEFAULT, &found);
    if (result != CUDA_SUCCESS || address == nullptr) {
      throw std::runtime_error("the CUDA driver has no " + std::string(name) + " of version " +
                               std::to_string(version) + ". Install a newer driver");
    }
    entry = reinterpret_cast<Function>(address);
  }

 private:
  PFN_cuGetProcAddress_v12000 get_;
};

// The versions are those of the types in CudaDriver.
CudaDriver load() {
  const Lookup find;
  CudaDriver driver{};
  find(driver.get_error_name, "cuGetErrorName", 6000);
  find(driver.get_error_string, "cuGetErrorString", 6000);
  find(driver.init, "cuInit", 2000);
  find(driver.device_get, "cuDeviceGet", 2000);
  find(driver.device_get_count, "cuDeviceGetCount", 2000);
  find(driver.device_get_name, "cuDeviceGetName", 2000);
  find(driver.device_get_uuid, "cuDeviceGetUuid", 11040);
  find(driver.device_get_attribute, "cuDeviceGetAttribute", 2000);
  find(driver.device_can_access_peer, "cuDeviceCanAccessPeer", 4000);
  find(driver.primary_context_retain, "cuDevicePrimaryCtxRetain", 7000);
  find(driver.context_push, "cuCtxPushCurrent", 4000);
  find(driver.context_pop, "cuCtxPopCurrent", 4000);
  find(driver.context_synchronize, "cuCtxSynchronize", 2000);
  find(driver.stream_create, "cuStreamCreate", 2000);
  find(driver.stream_synchronize, "cuStreamSynchronize", 2000);
  find(driver.stream_destroy, "cuStreamDestroy", 4000);
  find(driver.mem_get_info, "cuMemGetInfo", 3020);
  find(driver.mem_set_async, "cuMemsetD8Async", 3020);
  find(driver.mem_granularity, "cuMemGetAllocationGranularity", 10020);
  find(driver.mem_address_reserve, "cuMemAddressReserve", 10020);
  find(driver.mem_address_free, "cuMemAddressFree", 10020);
  find(driver.mem_create, "cuMemCreate", 10020);
  find(driver.mem_release, "cuMemRelease", 10020);
  find(driver.mem_map, "cuMemMap", 10020);
  find(driver.mem_unmap, "cuMemUnmap", 10020);
  find(driver.mem_set_access, "cuMemSetAccess", 10020);
  find(driver.mem_export, "cuMemExportToShareableHandle", 10020);
  find(driver.mem_import, "cuMemImportFromShareableHandle", 10020);
  driver.process = getpid();
  driver.check(driver.init(0), "cuInit");
  return driver;
}

// Empty where only the call itself can tell.
const char* advice_on(CUresult result) {
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return ". Lower max_tokens_per_rank, or free memory of this GPU (torch.cuda.empty_cache() "
             "gives back what torch keeps for later)";
    case CUDA_ERROR_NO_DEVICE:
      return ". Is the GPU given to this container, and listed in CUDA_VISIBLE_DEVICES?";
    default:
      return "";
  }
}

std::string named(int ordinal) { return "cuda:" + std::to_string(ordinal); }

// Of one process; never released, because tensors may be freed until its very end.
CUcontext primary_context(const CudaDriver& driver, int ordinal) {
  static std::mutex mutex;
  static auto* contexts = new std::map<int, CUcontext>();
  const CUdevice device = cuda_device_handle(ordinal);
  const std::lock_guard lock(mutex);
  CUcontext& context = (*contexts)[ordinal];
  if (context == nullptr) {
    driver.check(driver.primary_context_retain(&context, device),
                 "cuDevicePrimaryCtxRetain of " + named(ordinal));
  }
  return context;
}

}  // namespace

std::string CudaDriver::describe(CUresult result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  get_error_name(result, &name);
  get_error_string(result, &text);
  return (name != nullptr ? std::string(name) : std::to_string(result)) + " (" +
         (text != nullptr ? text : "unknown to this driver") + ")" + advice_on(result);
}

void CudaDriver::check(CUresult result, const std::string& call) const {
  if (result != CUDA_SUCCESS) throw CudaError(call + " failed: " + describe(result));
}

const CudaDriver& cuda_driver() {
  static const CudaDriver driver = load();
  return driver;
}

CUdevice cuda_device_handle(int ordinal) {
  CUdevice device = 0;
  const CUresult result = cuda_driver().device_get(&device, ordinal);
  if (result != CUDA_SUCCESS) {
    throw CudaError("cuDeviceGet of " + named(ordinal) +
                    " failed: " + cuda_driver().describe(result) +
                    ". Is the device listed in CUDA_VISIBLE_DEVICES?");
  }
  return device;
}

CurrentCudaDevice::CurrentCudaDevice(int ordinal) : driver_(cuda_driver()) {
  if (!driver_.in_its_process()) {
    throw std::runtime_error("this process was forked after its parent had used " + named(ordinal) +
                             ", which a forked process cannot use. Start it by spawn");
  }
  driver_.check(driver_.context_push(primary_context(driver_, ordinal)),
                "cuCtxPushCurrent of " + named(ordinal));
}

CurrentCudaDevice::~CurrentCudaDevice() {
  CUcontext popped = nullptr;
  driver_.context_pop(&popped);
}

}  // namespace moe_ep::memory
