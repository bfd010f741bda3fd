// The loop of a rank that sends to all its peers and receives from all of them at the same time.
#pragma once

#include <cstdint>
#include <optional>

#include "core/host_signal.h"
#include "transport/wait_for_peers.h"
#include "two_sided/segment.h"

namespace moe_ep::two_sided {

// The rank that is `distance` behind this one. Each rank begins with another peer, so that not all
// send to one first.
inline int32_t peer_at(const WorkspaceView& workspace, int32_t distance) {
  return (workspace.ep_rank + distance) % workspace.geometry.ep_size;
}

// Work has
//   bool step()              does what can be done with every peer, and waits for none: a rank that
//                            blocked on a full FIFO would not empty those that its peers block on.
//                            Returns whether it moved anything
//   bool is_done()
//   void for_each_awaited(visit)   calls visit(peer) for those that have not done their part
// The deadline is that of one wait: it counts from the moment when nothing more moved.
// control_of(peer) is the control block of a peer.
template <typename Work, typename ControlOf>
Outcome exchange(const PeerWait& how, int32_t ep_rank, const Segment& own, Work& work,
                 ControlOf control_of) {
  ControlBlock& control = own.control();
  std::optional<MissedPeer> missed;
  const auto miss = [&](Missed why) {
    work.for_each_awaited([&](int32_t peer) {
      if (!missed.has_value()) missed = missed_for(why, peer, control.epoch);
    });
  };
  const auto look_around = [&] {
    if (is_interrupted(how)) miss(Missed::kInterrupted);
    work.for_each_awaited([&](int32_t peer) {
      if (missed.has_value()) return;
      const auto obstacle = obstacle_of(control_of(peer), peer, ep_rank);
      if (obstacle.has_value()) missed = {peer, control.epoch, *obstacle};
    });
    return missed.has_value();
  };
  Deadline deadline{};
  for (bool is_waiting = false;;) {
    const uint32_t rung = load_acquire(own.bell());
    const bool moved = work.step();
    if (work.is_done()) return Outcome::kDone;
    if (moved) {
      is_waiting = false;
      continue;
    }
    if (!is_waiting) deadline = deadline_in(how.timeout_sec);
    is_waiting = true;
    const WaitResult result = wait(own.bell(), rung + 1, &control.sleepers, deadline, look_around);
    if (result.end == WaitEnd::kReached) continue;
    if (result.end == WaitEnd::kTimeout) miss(Missed::kDeadline);
    // What it did before it stopped is not lost.
    if (missed->obstacle.why != Missed::kInterrupted && (work.step() || work.is_done())) {
      missed.reset();
      is_waiting = false;
      continue;
    }
    return record_missed(how, control, *missed);
  }
}

}  // namespace moe_ep::two_sided
