// Which rank owns which expert: contiguous blocks, the first `num_experts % ep_size` ranks own one
// more.
#pragma once

#include <cstdint>

#include "core/fast_divide.h"
#include "core/host_device.h"

namespace moe_ep {

struct ExpertRange {
  int32_t first;
  int32_t count;
};

class ExpertPartition {
 public:
  MOE_EP_HOST_DEVICE constexpr ExpertPartition() : ExpertPartition(1, 1) {}
  MOE_EP_HOST_DEVICE constexpr ExpertPartition(int32_t num_experts, int32_t ep_size)
      : num_experts_(num_experts),
        small_(num_experts / ep_size),
        num_large_(num_experts % ep_size),
        end_of_large_(num_large_ * (small_ + 1)),
        by_large_(small_ + 1),
        by_small_(small_ > 0 ? small_ : 1) {}

  MOE_EP_HOST_DEVICE constexpr int32_t num_experts() const { return num_experts_; }

  MOE_EP_HOST_DEVICE constexpr ExpertRange of_rank(int32_t rank) const {
    const bool large = rank < num_large_;
    return {rank * small_ + (large ? rank : num_large_), small_ + (large ? 1 : 0)};
  }

  // The owner of an expert; `expert` must be in [0, num_experts). With fewer experts than ranks
  // every block is either of one expert or empty, and the second division is never reached.
  MOE_EP_HOST_DEVICE constexpr int32_t owner_of(int32_t expert) const {
    // Selects, then divides once: lanes with experts of both kinds do not part. Without the extra
    // experts of the large blocks, the small ones lie as if all blocks were small.
    const bool large = expert < end_of_large_;
    const FastDivider by = large ? by_large_ : by_small_;
    return by.divide(large ? expert : expert - num_large_);
  }

  MOE_EP_HOST_DEVICE constexpr bool contains(int64_t expert) const {
    return expert >= 0 && expert < num_experts_;
  }
  MOE_EP_HOST_DEVICE constexpr bool contains(int32_t expert) const {
    return static_cast<uint32_t>(expert) < static_cast<uint32_t>(num_experts_);
  }

 private:
  int32_t num_experts_;
  int32_t small_;         // experts of the ranks with the smaller share
  int32_t num_large_;     // ranks with one expert more
  int32_t end_of_large_;  // first expert behind those ranks
  FastDivider by_large_;
  FastDivider by_small_;
};

}  // namespace moe_ep
