// Stores of bytes that do not start on 16 bytes, or are fewer. (load_unaligned reads such.)
#pragma once

#include <cstdint>

namespace moe_ep {

template <typename Unit>
__device__ void store_units(uint8_t* to, uint4 chunk, int32_t bytes) {
  constexpr int32_t kBytes = sizeof(Unit);
#pragma unroll
  for (int32_t i = 0; i < 16; i += kBytes) {
    const uint32_t word = i / 4 == 0   ? chunk.x
                          : i / 4 == 1 ? chunk.y
                          : i / 4 == 2 ? chunk.z
                                       : chunk.w;
    if (i < bytes) *reinterpret_cast<Unit*>(to + i) = static_cast<Unit>(word >> i % 4 * 8);
  }
}

// The first `bytes` of a chunk, in the widest units that the place and the number allow.
__device__ inline void store_unaligned(uint8_t* to, uint4 chunk, int32_t bytes) {
  const uint64_t alignment = reinterpret_cast<uint64_t>(to) | static_cast<uint32_t>(bytes);
  if (alignment % 4 == 0) {
    store_units<uint32_t>(to, chunk, bytes);
  } else if (alignment % 2 == 0) {
    store_units<uint16_t>(to, chunk, bytes);
  } else {
    store_units<uint8_t>(to, chunk, bytes);
  }
}

}  // namespace moe_ep
