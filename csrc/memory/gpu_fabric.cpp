#include "memory/gpu_fabric.h"

#include <dlfcn.h>

#include <algorithm>

namespace moe_ep::memory {
namespace {

// NVML's interface as far as it is needed: its header is no part of the CUDA toolkit's core, and
// its values are fixed. 0 is success everywhere.
struct Device;
using Init = int (*)();
using Shutdown = int (*)();
using GetDeviceByUuid = int (*)(const char* uuid, Device** device);

// nvmlGpuFabricInfo_v2_t
struct FabricInfo {
  uint32_t version;
  unsigned char cluster[16];
  int32_t status;  // meaningful once the state is kCompleted
  uint32_t clique;
  unsigned char state;
  uint32_t health;
};
static_assert(sizeof(FabricInfo) == 36);
constexpr uint32_t kVersion2 = sizeof(FabricInfo) | (2U << 24);
constexpr unsigned char kCompleted = 3;
using GetFabricInfo = int (*)(Device* device, FabricInfo* info);

// While it lives, NVML is loaded and initialised; nothing in it is called otherwise.
class Nvml {
 public:
  Nvml() : library_(dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) return;
    const auto init = find<Init>("nvmlInit_v2");
    shutdown_ = find<Shutdown>("nvmlShutdown");
    ready_ = init != nullptr && shutdown_ != nullptr && init() == 0;
  }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;
  ~Nvml() {
    if (ready_) shutdown_();
    if (library_ != nullptr) dlclose(library_);
  }

  std::optional<FabricInfo> fabric_info(const std::string& gpu_uuid) const {
    if (!ready_) return std::nullopt;
    const auto get_device = find<GetDeviceByUuid>("nvmlDeviceGetHandleByUUID");
    const auto get_info = find<GetFabricInfo>("nvmlDeviceGetGpuFabricInfoV");
    if (get_device == nullptr || get_info == nullptr) return std::nullopt;
    Device* device = nullptr;
    FabricInfo info{};
    info.version = kVersion2;
    if (get_device(gpu_uuid.c_str(), &device) != 0 || get_info(device, &info) != 0) {
      return std::nullopt;
    }
    return info;
  }

 private:
  template <typename Function>
  Function find(const char* name) const {
    return reinterpret_cast<Function>(dlsym(library_, name));
  }

  void* library_;
  Shutdown shutdown_ = nullptr;
  bool ready_ = false;
};

}  // namespace

std::optional<GpuFabric> gpu_fabric(const std::string& gpu_uuid) {
  const auto info = Nvml().fabric_info(gpu_uuid);
  if (!info || info->state != kCompleted || info->status != 0) return std::nullopt;
  // A GPU in no domain has the number zero, as all others in none.
  if (std::ranges::all_of(info->cluster, [](unsigned char byte) { return byte == 0; })) {
    return std::nullopt;
  }
  return GpuFabric{std::string(reinterpret_cast<const char*>(info->cluster), sizeof(info->cluster)),
                   info->clique};
}

}  // namespace moe_ep::memory
