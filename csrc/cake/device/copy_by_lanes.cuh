// Copies of bytes that the copy engine cannot read, since they do not start on 16 bytes.
#pragma once

#include <cstdint>

#include "cake/namespace.h"
#include "one_sided/device/routing.cuh"

namespace moe_ep::cake {

// Copies with the lanes of a warp, many loads in flight.
template <typename Unit>
__device__ void copy_units(uint8_t* to, const uint8_t* from, uint32_t bytes) {
  constexpr int kInFlight = 8;
  const uint32_t units = bytes / sizeof(Unit);
  const Unit* in = reinterpret_cast<const Unit*>(from);
  Unit* out = reinterpret_cast<Unit*>(to);
  for (uint32_t begin = lane_id(); begin < units; begin += kInFlight * kWarpSize) {
    Unit unit[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (begin + i * kWarpSize < units) unit[i] = in[begin + i * kWarpSize];
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (begin + i * kWarpSize < units) out[begin + i * kWarpSize] = unit[i];
    }
  }
}

// For rows that the copy engine cannot read: in the widest units of which their start, stride and
// width (or-ed together: `alignment`) are multiples.
__device__ inline void copy_by_lanes(uint8_t* to, const uint8_t* from, uint32_t bytes,
                                     uint64_t alignment) {
  if (alignment % 8 == 0) {
    copy_units<uint64_t>(to, from, bytes);
  } else if (alignment % 4 == 0) {
    copy_units<uint32_t>(to, from, bytes);
  } else if (alignment % 2 == 0) {
    copy_units<uint16_t>(to, from, bytes);
  } else {
    copy_units<uint8_t>(to, from, bytes);
  }
}

}  // namespace moe_ep::cake
