// Which NVLink domain is a GPU in? GPUs of several hosts can map each other's memory only within
// one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace moe_ep::memory {

struct GpuFabric {
  std::string cluster;  // 16 bytes
  uint32_t clique;
};

// Asks NVML, which is loaded for the call. None where it is not there, or the GPU is not (or not
// yet) registered in a domain.
std::optional<GpuFabric> gpu_fabric(const std::string& gpu_uuid);

}  // namespace moe_ep::memory
