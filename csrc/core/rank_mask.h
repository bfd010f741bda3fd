// A set of ranks as 64-bit words, bit i of word i / 64 for rank i. The mask of active ranks that
// users pass has this form, and so has the set of ranks that one token goes to.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/limits.h"

namespace moe_ep {

inline constexpr int32_t kRanksPerMaskWord = 64;

MOE_EP_HOST_DEVICE constexpr int32_t rank_mask_words(int32_t ep_size) {
  return (ep_size + kRanksPerMaskWord - 1) / kRanksPerMaskWord;
}

struct RankMask {
  uint64_t words[kMaxEpSize / kRanksPerMaskWord] = {};

  MOE_EP_HOST_DEVICE static constexpr RankMask all(int32_t ep_size) {
    RankMask mask;
    for (int32_t rank = 0; rank < ep_size; ++rank) mask.insert(rank);
    return mask;
  }
  bool operator==(const RankMask&) const = default;
  MOE_EP_HOST_DEVICE constexpr void insert(int32_t rank) {
    words[rank / kRanksPerMaskWord] |= uint64_t{1} << (rank % kRanksPerMaskWord);
  }
  MOE_EP_HOST_DEVICE constexpr bool contains(int32_t rank) const {
    return (words[rank / kRanksPerMaskWord] >> (rank % kRanksPerMaskWord)) & 1;
  }
};

}  // namespace moe_ep
