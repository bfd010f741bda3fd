// Waits on peers end by wall clock, are recorded, and leave the context alive.
//
// A Workspace is a rank's, of any transport, as its kernels see it: it has page, timeout_ns and
// timeout_sec, and there are
//   failed_word(workspace)               a word in device memory that is 0 at first
//   obstacle_of(workspace, peer, epoch)  why a peer will not answer in the round of that epoch, as
//                                        far as its memory tells; kDeadline: it may be slow
//   tell_more(workspace, why, peer)      what else the host's page has room for
#pragma once

#include <cstdint>

#include "core/device_signal.cuh"
#include "core/epoch.h"
#include "core/status_page.h"

namespace moe_ep {

// Whether a wait has expired on this rank, in this kernel or an earlier one. A racy look is enough:
// who misses it waits for the deadline itself.
template <typename Workspace>
__device__ bool has_failed(const Workspace& workspace) {
  return *const_cast<volatile uint32_t*>(failed_word(workspace)) != 0;
}

// Marks the rank as failed; the first to do so tells the host why.
template <typename Workspace>
__device__ void record_missed(const Workspace& workspace, Missed why, Phase phase, int32_t peer,
                              uint32_t expected, uint32_t seen) {
  if (atomicExch(failed_word(workspace), 1u) != 0) return;
  TimeoutRecord* record = &workspace.page->timeout;
  record->peer = peer;
  record->phase = phase;
  record->epoch_expected = expected;
  record->epoch_seen = seen;
  record->timeout_sec = workspace.timeout_sec;
  record->why = why;
  record->first_missed = peer;
  record->first_why = why;
  tell_more(workspace, why, peer);
  __threadfence_system();  // the host sees `recorded` last
  *const_cast<volatile uint32_t*>(&record->recorded) = 1;
}

// From then on a wait looks at the peer's memory, too: far beyond a round, far below a time-out.
inline constexpr uint64_t kLongWaitNs = 10'000'000;

inline constexpr int32_t kNobody = -1;
inline constexpr int32_t kGivenUp = -2;

// What a wait that has lasted `waited` ns does now and then, and not in line: of a short one it
// would be dead weight between its instructions, a sixth of the packet dispatch of a usual step.
// doubted: the peer that will not answer if it has not by this look; kNobody. Returns the same for
// the next look, or kGivenUp: why is recorded.
template <typename Workspace>
__device__ __noinline__ int32_t look_up_from_wait(const Workspace& workspace, Phase phase,
                                                  int32_t peer, uint32_t expected, uint32_t seen,
                                                  uint64_t waited, int32_t doubted) {
  if (has_failed(workspace)) return kGivenUp;
  Missed why = Missed::kDeadline;
  if (waited <= workspace.timeout_ns) {
    if (waited <= kLongWaitNs) return kNobody;
    why = obstacle_of(workspace, peer, expected);
    if (why == Missed::kDeadline) return kNobody;
    // It may have answered before it left: the polls until the next look tell.
    if (doubted != peer) return peer;
  }
  record_missed(workspace, why, phase, peer, expected, seen);
  return kGivenUp;
}

// The same without a look at the peer. True: give up.
template <typename Workspace>
__device__ __noinline__ bool look_at_clock_from_wait(const Workspace& workspace, Phase phase,
                                                     int32_t peer, uint32_t expected, uint32_t seen,
                                                     uint64_t waited) {
  if (has_failed(workspace)) return true;
  if (waited <= workspace.timeout_ns) return false;
  record_missed(workspace, Missed::kDeadline, phase, peer, expected, seen);
  return true;
}

// The patience of one wait loop. The clock is read at every 64th poll (measured: 0 to 0.1 us a
// round); once a wait of this rank has expired, the others give up at their next look, so that a
// broken round ends soon.
class Patience {
 public:
  // Counts a poll that did not succeed. True: give up; why is recorded.
  template <typename Workspace>
  __device__ bool exhausted(const Workspace& workspace, Phase phase, int32_t peer,
                            uint32_t expected, uint32_t seen) {
    if (!counts_to_look()) return false;
    doubted_ = look_up_from_wait(workspace, phase, peer, expected, seen, waited(), doubted_);
    return doubted_ == kGivenUp;
  }
  // The same in two steps, where it costs something to know the peer, and does not look at it:
  // beside another wait that does, or where registers are dear.
  __device__ bool counts_to_look() { return (++polls_ & 63) == 0; }
  template <typename Workspace>
  __device__ bool has_run_out(const Workspace& workspace, Phase phase, int32_t peer,
                              uint32_t expected, uint32_t seen) {
    return look_at_clock_from_wait(workspace, phase, peer, expected, seen, waited());
  }

 private:
  __device__ uint64_t waited() {
    const uint64_t now = now_ns();
    if (started_ == 0) started_ = now;
    return now - started_;
  }

  uint32_t polls_ = 0;
  int32_t doubted_ = kNobody;
  uint64_t started_ = 0;
};

}  // namespace moe_ep
