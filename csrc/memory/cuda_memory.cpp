#include "memory/cuda_memory.h"

#include <fcntl.h>

#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "memory/address_range.h"
#include "memory/cuda_driver.h"
#include "memory/physical_allocation.h"

namespace moe_ep::memory {
namespace {

CUdeviceptr as_pointer(const std::byte* at) { return reinterpret_cast<CUdeviceptr>(at); }

CUmemAllocationHandleType as_type(HandleForm form) {
  return form == HandleForm::kFabric ? CU_MEM_HANDLE_TYPE_FABRIC
                                     : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

class CudaMemory final : public MemoryKind {
 public:
  explicit CudaMemory(int ordinal) : ordinal_(ordinal) {}

  std::optional<int> cuda_ordinal() const override { return ordinal_; }

  uint64_t granularity() const override { return kCudaGranularity; }

  std::byte* reserve(uint64_t bytes) override {
    const CurrentCudaDevice current(ordinal_);
    CUdeviceptr base = 0;
    check(cuda_driver().mem_address_reserve(&base, bytes, kCudaGranularity, 0, 0),
          "cuMemAddressReserve of", bytes);
    return reinterpret_cast<std::byte*>(base);
  }

  // After the driver has shut down at exit, this and destroy() are refused and do no harm.
  void free_reserved(std::byte* base, uint64_t bytes) noexcept override {
    if (!cuda_driver().in_its_process()) return;
    cuda_driver().mem_address_free(as_pointer(base), bytes);
  }

  PhysicalId create(uint64_t bytes, HandleForm form) override {
    const CurrentCudaDevice current(ordinal_);
    const CUmemAllocationProp properties = properties_for(form);
    check_granularity(properties);
    CUmemGenericAllocationHandle memory = 0;
    check(cuda_driver().mem_create(&memory, bytes, &properties, 0),
          "cuMemCreate (to share by " + std::string(name_of(form)) + ") of", bytes);
    try {
      fill_with_zeros(PhysicalId{memory}, bytes);
    } catch (...) {
      cuda_driver().mem_release(memory);
      throw;
    }
    return PhysicalId{memory};
  }

  void destroy(PhysicalId id) noexcept override {
    if (!cuda_driver().in_its_process()) return;
    cuda_driver().mem_release(static_cast<CUmemGenericAllocationHandle>(id));
  }

  ShareableHandle export_handle(PhysicalId id, uint64_t bytes, HandleForm form) override {
    const CurrentCudaDevice current(ordinal_);
    const auto memory = static_cast<CUmemGenericAllocationHandle>(id);
    constexpr const char* kCall = "cuMemExportToShareableHandle of";
    if (form == HandleForm::kFabric) {
      CUmemFabricHandle fabric{};
      check(cuda_driver().mem_export(&fabric, memory, as_type(form), 0), kCall, bytes);
      ShareableHandle::FabricBytes content;
      static_assert(sizeof(content) == sizeof(fabric.data));
      std::memcpy(content.data(), fabric.data, sizeof(content));
      return ShareableHandle(content, bytes);
    }
    int fd = -1;
    check(cuda_driver().mem_export(&fd, memory, as_type(form), 0), kCall, bytes);
    FileDescriptor descriptor(fd);
    fcntl(fd, F_SETFD, FD_CLOEXEC);  // programs that this process starts have no use for it
    return ShareableHandle(std::move(descriptor), bytes);
  }

  // How large the memory is the driver does not tell; map() refuses what is too small.
  PhysicalId import_handle(ShareableHandle handle) override {
    const CurrentCudaDevice current(ordinal_);
    CUmemGenericAllocationHandle memory = 0;
    CUmemFabricHandle fabric{};
    void* content = nullptr;
    if (const auto* bytes = handle.fabric()) {
      std::memcpy(fabric.data, bytes->data(), bytes->size());
      content = &fabric;
    } else {  // the driver wants the number itself; the descriptor stays ours to close
      content = reinterpret_cast<void*>(static_cast<intptr_t>(handle.descriptor()));
    }
    check(cuda_driver().mem_import(&memory, content, as_type(handle.form())),
          "cuMemImportFromShareableHandle of", handle.bytes());
    return PhysicalId{memory};
  }

  void map(std::byte* at, uint64_t bytes, PhysicalId id) override {
    const CurrentCudaDevice current(ordinal_);
    const auto memory = static_cast<CUmemGenericAllocationHandle>(id);
    check(cuda_driver().mem_map(as_pointer(at), bytes, 0, memory, 0), "cuMemMap of", bytes);
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = ordinal_;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const CUresult result = cuda_driver().mem_set_access(as_pointer(at), bytes, &access, 1);
    if (result != CUDA_SUCCESS) cuda_driver().mem_unmap(as_pointer(at), bytes);
    check(result, "cuMemSetAccess of", bytes);
  }

  void unmap(std::byte* at, uint64_t bytes) override {
    const CurrentCudaDevice current(ordinal_);
    // An error of earlier work on the device is not ours to report: whoever did the work sees it.
    cuda_driver().context_synchronize();
    check(cuda_driver().mem_unmap(as_pointer(at), bytes), "cuMemUnmap of", bytes);
  }

  CUmemAllocationProp properties_for(HandleForm form) const {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = ordinal_;
    properties.requestedHandleTypes = as_type(form);
    return properties;
  }

 private:
  void check(CUresult result, const std::string& call, uint64_t bytes) const {
    if (result == CUDA_SUCCESS) return;
    cuda_driver().check(
        result, call + " " + std::to_string(bytes) + " bytes on cuda:" + std::to_string(ordinal_));
  }

  void check_granularity(const CUmemAllocationProp& properties) const {
    size_t granularity = 0;
    cuda_driver().check(
        cuda_driver().mem_granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        "cuMemGetAllocationGranularity of cuda:" + std::to_string(ordinal_));
    if (granularity == 0 || kCudaGranularity % granularity != 0) {
      throw std::runtime_error("cuda:" + std::to_string(ordinal_) + " maps memory in granules of " +
                               std::to_string(granularity) + " bytes, this library needs " +
                               std::to_string(kCudaGranularity) + " or a fraction of it");
    }
  }

  // New memory holds what the driver left in it. Through a mapping of its own that is gone
  // afterwards, on a stream of its own: nothing that runs on the device is waited for.
  void fill_with_zeros(PhysicalId id, uint64_t bytes) {
    const CudaDriver& driver = cuda_driver();
    const AddressRange window(*this, bytes);
    map(window.base(), bytes, id);
    CUstream stream = nullptr;
    CUresult filled = driver.stream_create(&stream, CU_STREAM_NON_BLOCKING);
    if (filled == CUDA_SUCCESS) {
      filled = driver.mem_set_async(as_pointer(window.base()), 0, bytes, stream);
      const CUresult done = driver.stream_synchronize(stream);
      if (filled == CUDA_SUCCESS) filled = done;
      driver.stream_destroy(stream);
    }
    const CUresult unmapped = driver.mem_unmap(as_pointer(window.base()), bytes);
    check(filled, "cuMemsetD8Async of", bytes);
    check(unmapped, "cuMemUnmap of", bytes);
  }

  int ordinal_;
};

std::string as_text(const CUuuid& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    constexpr char kDigits[] = "0123456789abcdef";
    const auto byte = static_cast<unsigned char>(uuid.bytes[i]);
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

std::string uuid_of(CUdevice device) {
  CUuuid uuid{};
  cuda_driver().check(cuda_driver().device_get_uuid(&uuid, device), "cuDeviceGetUuid");
  return as_text(uuid);
}

}  // namespace

MemoryKind& cuda_memory(int ordinal) {
  static std::mutex mutex;
  static auto* kinds = new std::map<int, CudaMemory>();  // memory may be freed until the very end
  const std::lock_guard lock(mutex);
  return kinds->try_emplace(ordinal, ordinal).first->second;
}

CudaDevice cuda_device(int ordinal) {
  const CurrentCudaDevice current(ordinal);
  const CudaDriver& driver = cuda_driver();
  const CUdevice device = cuda_device_handle(ordinal);
  char name[256] = {};
  driver.check(driver.device_get_name(name, sizeof(name) - 1, device), "cuDeviceGetName");
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  driver.check(driver.mem_get_info(&free_bytes, &total_bytes), "cuMemGetInfo");
  return {name, uuid_of(device), free_bytes};
}

std::string reason_against(int ordinal, HandleForm form) {
  const CudaDriver& driver = cuda_driver();
  const CUdevice device = cuda_device_handle(ordinal);
  const auto attribute = form == HandleForm::kFabric
                             ? CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
                             : CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
  int supported = 0;
  // A driver that does not know the attribute does not have what it tells of.
  if (driver.device_get_attribute(&supported, attribute, device) != CUDA_SUCCESS || !supported) {
    return "not supported by the device or its driver";
  }
  try {
    MemoryKind& kind = cuda_memory(ordinal);
    PhysicalAllocation::create(kind, kCudaGranularity, form).share();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

std::optional<bool> can_access_peer(int ordinal, const std::string& peer_uuid) {
  const CudaDriver& driver = cuda_driver();
  const CUdevice device = cuda_device_handle(ordinal);
  int devices = 0;
  driver.check(driver.device_get_count(&devices), "cuDeviceGetCount");
  for (int other = 0; other < devices; ++other) {
    const CUdevice peer = cuda_device_handle(other);
    if (uuid_of(peer) != peer_uuid) continue;
    if (peer == device) return true;
    int can = 0;
    driver.check(driver.device_can_access_peer(&can, device, peer), "cuDeviceCanAccessPeer");
    return can != 0;
  }
  return std::nullopt;
}

}  // namespace moe_ep::memory
