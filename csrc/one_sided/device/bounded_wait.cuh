// Which word says that a wait has expired.
#pragma once

#include <cstdint>

#include "one_sided/device/workspace.cuh"
#include "transport/device/bounded_wait.cuh"

namespace moe_ep::one_sided {

__device__ inline uint32_t* failed_word(const DeviceWorkspace& workspace) {
  return &own_segment(workspace).state()->failed;
}

}  // namespace moe_ep::one_sided
