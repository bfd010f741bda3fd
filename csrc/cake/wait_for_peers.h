// One wait of a phase: on every active peer in turn, with one deadline for all of them.
#pragma once

#include <chrono>
#include <cstdint>

#include "cake/segment.h"
#include "core/host_signal.h"
#include "core/rank_mask.h"

namespace moe_ep::cake {

inline Deadline deadline_in(int32_t timeout_sec) {
  return std::chrono::steady_clock::now() + std::chrono::seconds(timeout_sec);
}

// `flag_of(peer)` is the word that this peer signals in the own segment. Returns false when the
// deadline passed; the record in the control block then names the first peer that was missed.
template <typename FlagOf>
bool wait_for_peers(const WorkspaceView& workspace, const RankMask& active, ControlBlock& control,
                    Phase phase, int32_t timeout_sec, FlagOf flag_of) {
  const Deadline deadline = deadline_in(timeout_sec);
  for (int32_t peer = 0; peer < workspace.geometry.ep_size; ++peer) {
    if (!active.contains(peer)) continue;
    const WaitResult result = wait(flag_of(peer), control.epoch, &control.sleepers, deadline);
    if (result.reached) continue;
    control.timeout = {1, peer, phase, control.epoch, result.seen, timeout_sec};
    return false;
  }
  return true;
}

}  // namespace moe_ep::cake
