// Which word says that a wait has expired.
#pragma once

#include <cstdint>

#include "cake/device/workspace.cuh"
#include "transport/device/bounded_wait.cuh"

namespace moe_ep::cake {

__device__ inline uint32_t* failed_word(const DeviceWorkspace& workspace) {
  return &own_segment(workspace).state()->failed;
}

}  // namespace moe_ep::cake
