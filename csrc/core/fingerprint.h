// Tells geometries apart: a hash of their fields (FNV-1a).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/host_device.h"

namespace moe_ep {

template <size_t kFields>
MOE_EP_HOST_DEVICE constexpr uint64_t fingerprint_of(const uint64_t (&fields)[kFields]) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const uint64_t field : fields) {
    for (int shift = 0; shift < 64; shift += 8) {
      hash = (hash ^ ((field >> shift) & 0xff)) * 0x100000001b3u;
    }
  }
  return hash;
}

}  // namespace moe_ep
