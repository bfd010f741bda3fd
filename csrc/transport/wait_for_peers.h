// One wait of a phase: on every active peer in turn, with one deadline for all of them.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "core/host_signal.h"
#include "core/interrupt.h"
#include "core/rank_mask.h"
#include "core/workspace_layout.h"
#include "transport/outcome.h"
#include "transport/peer_state.h"

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
  InterruptCheck interrupted;  // null: no handler of a signal ends a wait
};

// A peer that has not answered, and why it will not.
struct MissedPeer {
  int32_t peer;
  uint32_t epoch_seen;
  Obstacle obstacle;
};

inline MissedPeer missed_for(Missed why, int32_t peer, uint32_t epoch_seen) {
  return {peer, epoch_seen, {why, peer, why}};
}

// Puts into the control block on whom this rank waited in vain, for the host's error and for peers
// that look, and returns what that means.
inline Outcome record_missed(const PeerWait& how, ControlBlock& control, const MissedPeer& missed) {
  TimeoutRecord& record = control.timeout;
  record.peer = missed.peer;
  record.phase = how.phase;
  record.epoch_expected = control.epoch;
  record.epoch_seen = missed.epoch_seen;
  record.timeout_sec = how.timeout_sec;
  record.why = missed.obstacle.why;
  record.first_missed = missed.obstacle.first_missed;
  record.first_why = missed.obstacle.first_why;
  store_release(&record.recorded, 1);
  return missed.obstacle.why == Missed::kInterrupted ? Outcome::kInterrupted : Outcome::kTimeout;
}

inline bool is_interrupted(const PeerWait& how) {
  return how.interrupted != nullptr && how.interrupted();
}

// `flag_of(peer)` is the word that this peer signals in the own segment. `obstacle(peer)` says what
// keeps one that has not signalled from doing so, and may find fault with one that has: it is asked
// about all of them now and then, so that it does not matter whom this rank happens to wait for. On
// any other end than kDone the record in the control block names the peer.
template <typename FlagOf, typename ObstacleOf>
Outcome wait_for_peers(const PeerWait& how, ControlBlock& control, Deadline deadline,
                       FlagOf flag_of, ObstacleOf obstacle_of_peer) {
  std::optional<MissedPeer> missed;
  const auto look_around = [&](int32_t awaited) {
    if (is_interrupted(how)) {
      missed = missed_for(Missed::kInterrupted, awaited, load_acquire(flag_of(awaited)));
      return true;
    }
    for (int32_t peer = 0; peer < how.ep_size && !missed.has_value(); ++peer) {
      if (!how.active.contains(peer)) continue;
      const std::optional<Obstacle> obstacle = obstacle_of_peer(peer);
      if (obstacle.has_value()) missed = {peer, load_acquire(flag_of(peer)), *obstacle};
    }
    return missed.has_value();
  };
  for (int32_t peer = 0; peer < how.ep_size; ++peer) {
    if (!how.active.contains(peer)) continue;
    const WaitResult result = wait(flag_of(peer), control.epoch, &control.sleepers, deadline,
                                   [&] { return look_around(peer); });
    // A peer may be ahead by a phase, never by a round: the next one needs this rank.
    const bool in_step = result.seen == control.epoch;
    if (result.end == WaitEnd::kReached && in_step) continue;
    if (result.end == WaitEnd::kGivenUp) return record_missed(how, control, *missed);
    return record_missed(how, control, missed_for(Missed::kDeadline, peer, result.seen));
  }
  return Outcome::kDone;
}

}  // namespace moe_ep
