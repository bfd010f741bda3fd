// The lanes of a warp.
#pragma once

#include <cstdint>

namespace moe_ep {

inline constexpr int kWarpSize = 32;
inline constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x % kWarpSize); }
__device__ inline uint32_t bits_below(int bit) { return (1u << bit) - 1; }  // bit < 32

}  // namespace moe_ep
