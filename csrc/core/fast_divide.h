// Division of non-negative int32 by a number that is known before the loop: one multiplication.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace moe_ep {

// Exact for every dividend in [0, 2^31): the multiplier exceeds 2^(31 + shift) / divisor by less
// than 2^shift / divisor, too little to reach the next integer.
class FastDivider {
 public:
  MOE_EP_HOST_DEVICE explicit constexpr FastDivider(int32_t divisor) {
    while ((int64_t{1} << shift_) < divisor) ++shift_;
    const uint64_t power = uint64_t{1} << (31 + shift_);
    multiplier_ = static_cast<uint32_t>((power + static_cast<uint64_t>(divisor) - 1) /
                                        static_cast<uint64_t>(divisor));
  }
  MOE_EP_HOST_DEVICE constexpr int32_t divide(int32_t dividend) const {
    // The high half of a product of words is one instruction.
    const uint64_t product = uint64_t{2} * static_cast<uint32_t>(dividend) * multiplier_;
    return static_cast<int32_t>(static_cast<uint32_t>(product >> 32) >> shift_);
  }

 private:
  uint32_t multiplier_;
  int32_t shift_ = 0;
};

}  // namespace moe_ep
