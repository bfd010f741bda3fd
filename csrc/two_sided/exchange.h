// The loop of a rank that sends to all its peers and receives from all of them at the same time.
#pragma once

#include <cstdint>

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
//   int32_t awaited_peer()   one that has not done its part
// The deadline is that of one wait: it counts from the moment when nothing more moved.
template <typename Work>
Outcome exchange(const PeerWait& how, const Segment& own, Work& work) {
  ControlBlock& control = own.control();
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
    const WaitResult result =
        wait(own.bell(), rung + 1, &control.sleepers, deadline, how.interrupted);
    if (result.end == WaitEnd::kReached) continue;
    return record_missed(how, control, work.awaited_peer(), control.epoch, result.end);
  }
}

}  // namespace moe_ep::two_sided
