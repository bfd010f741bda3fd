// The memory of one CUDA device as a MemoryKind, and what a group must know about its GPUs to share
// it.
//
// Needs no CUDA header: where the build had none, cuda_unavailable.cpp stands in, and whatever asks
// for a device throws. Functions that take an ordinal throw std::runtime_error where it names no
// usable device.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "memory/memory_kind.h"

namespace moe_ep::memory {

// Of all GPUs that this library runs on, for both forms of handle, so that sizes can be told
// without a GPU. create() checks it against the driver.
constexpr uint64_t kCudaGranularity = uint64_t{2} << 20;

// By torch's ordinal. Lives as long as the program. Touches no driver before the first reserve() or
// create(). Its functions work in any thread and leave the thread's current device alone.
MemoryKind& cuda_memory(int ordinal);

struct CudaDevice {
  std::string name;     // "NVIDIA H200"
  std::string uuid;     // "GPU-...": the same in all processes, whatever each of them can see
  uint64_t free_bytes;  // now, with this process's context already taken
};
CudaDevice cuda_device(int ordinal);

// Why memory of this device cannot be shared in this form; empty if it can. Tries it with one
// granule: the driver's attribute alone may promise what its creation then refuses.
std::string reason_against(int ordinal, HandleForm form);

// Whether the device can map memory of the peer; none where this process does not see the peer.
std::optional<bool> can_access_peer(int ordinal, const std::string& peer_uuid);

}  // namespace moe_ep::memory
