// Rounds are numbered by epochs. A flag carries the epoch of the round that its writer has
// published.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace moe_ep {

enum class Phase : uint32_t { kIdle = 0, kDispatch = 1, kCombine = 2 };

MOE_EP_HOST_DEVICE constexpr const char* phase_name(Phase phase) {
  return phase == Phase::kDispatch ? "dispatch" : phase == Phase::kCombine ? "combine" : "idle";
}

// A peer may be a phase ahead, so a waiter compares with "not before" and never with equality: a
// fast peer satisfies a slow one instead of hanging it. The signed difference survives the wrap at
// 2^32.
MOE_EP_HOST_DEVICE constexpr bool epoch_reached(uint32_t seen, uint32_t expected) {
  return static_cast<int32_t>(seen - expected) >= 0;
}

// What the fourth word of a packet holds: the epoch, which is compared with equality. A slot that
// was never written holds 0, so round 0, that of the wrap, is known by another number: by that of
// the round farthest from it.
MOE_EP_HOST_DEVICE constexpr uint32_t packet_tag(uint32_t epoch) {
  return epoch != 0 ? epoch : uint32_t{1} << 31;
}
static_assert(packet_tag(1) == 1 && packet_tag(0) != 0);

}  // namespace moe_ep
