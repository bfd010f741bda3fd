// One wait of a phase: on every active peer in turn, with one deadline for all of them.
#pragma once

#include <chrono>
#include <cstdint>

#include "core/host_signal.h"
#include "core/interrupt.h"
#include "core/rank_mask.h"
#include "core/workspace_layout.h"
#include "transport/outcome.h"

namespace moe_ep {

inline Deadline deadline_in(int32_t timeout_sec) {
  return std::chrono::steady_clock::now() + std::chrono::seconds(timeout_sec);
}

// Whom this rank waits for, and how long.
struct PeerWait {
  int32_t ep_size;
  RankMask active;
  Phase phase;
  int32_t timeout_sec;
  InterruptCheck interrupted;  // null: waits end with their deadline only
};

// Puts into the control block on whom this rank waited in vain, and returns what that means.
inline Outcome record_missed(const PeerWait& how, ControlBlock& control, int32_t peer,
                             uint32_t epoch_seen, WaitEnd end) {
  control.timeout = {1, peer, how.phase, control.epoch, epoch_seen, how.timeout_sec};
  return end == WaitEnd::kInterrupted ? Outcome::kInterrupted : Outcome::kTimeout;
}

// `flag_of(peer)` is the word that this peer signals in the own segment. On any other end than
// kReached the record in the control block names the first peer that was missed.
template <typename FlagOf>
Outcome wait_for_peers(const PeerWait& how, ControlBlock& control, Deadline deadline,
                       FlagOf flag_of) {
  for (int32_t peer = 0; peer < how.ep_size; ++peer) {
    if (!how.active.contains(peer)) continue;
    const WaitResult result =
        wait(flag_of(peer), control.epoch, &control.sleepers, deadline, how.interrupted);
    // A peer may be ahead by a phase, never by a round: the next one needs this rank.
    const bool in_step = result.seen == control.epoch;
    if (result.end == WaitEnd::kReached && in_step) continue;
    return record_missed(how, control, peer, result.seen, result.end);
  }
  return Outcome::kDone;
}

}  // namespace moe_ep
