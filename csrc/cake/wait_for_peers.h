// One wait of a phase: on every active peer in turn, with one deadline for all of them.
#pragma once

#include <chrono>
#include <cstdint>

#include "cake/cpu.h"
#include "cake/segment.h"
#include "core/host_signal.h"
#include "core/rank_mask.h"

namespace moe_ep::cake {

inline Deadline deadline_in(int32_t timeout_sec) {
  return std::chrono::steady_clock::now() + std::chrono::seconds(timeout_sec);
}

// `flag_of(peer)` is the word that this peer signals in the own segment. On any other end than
// kReached the record in the control block names the first peer that was missed.
template <typename FlagOf>
Outcome wait_for_peers(const WorkspaceView& workspace, const RankMask& active,
                       ControlBlock& control, Phase phase, int32_t timeout_sec, Deadline deadline,
                       FlagOf flag_of) {
  for (int32_t peer = 0; peer < workspace.geometry.ep_size; ++peer) {
    if (!active.contains(peer)) continue;
    const WaitResult result =
        wait(flag_of(peer), control.epoch, &control.sleepers, deadline, workspace.interrupted);
    // A peer may be ahead by a phase, never by a round: the next one needs this rank.
    const bool in_step = result.seen == control.epoch;
    if (result.end == WaitEnd::kReached && in_step) continue;
    control.timeout = {1, peer, phase, control.epoch, result.seen, timeout_sec};
    return result.end == WaitEnd::kInterrupted ? Outcome::kInterrupted : Outcome::kTimeout;
  }
  return Outcome::kDone;
}

}  // namespace moe_ep::cake
