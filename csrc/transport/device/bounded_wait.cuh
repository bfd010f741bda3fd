// Waits on peers end by wall clock, are recorded, and leave the context alive.
//
// A Workspace is a rank's, of any transport, as its kernels see it: it has page, timeout_ns and
// timeout_sec, and there is failed_word(workspace), a word in device memory that is 0 at first.
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
__device__ void record_timeout(const Workspace& workspace, Phase phase, int32_t peer,
                               uint32_t expected, uint32_t seen) {
  if (atomicExch(failed_word(workspace), 1u) != 0) return;
  TimeoutRecord* record = &workspace.page->timeout;
  record->peer = peer;
  record->phase = phase;
  record->epoch_expected = expected;
  record->epoch_seen = seen;
  record->timeout_sec = workspace.timeout_sec;
  __threadfence_system();  // the host sees `recorded` last
  *const_cast<volatile uint32_t*>(&record->recorded) = 1;
}

// The patience of one wait loop. The clock is read at every 64th poll (measured: 0 to 0.1 us a
// round); once a wait of this rank has expired, the others give up at their next look, so that a
// broken round ends soon.
class Patience {
 public:
  // Counts a poll that did not succeed. True: give up; the time-out is recorded.
  template <typename Workspace>
  __device__ bool exhausted(const Workspace& workspace, Phase phase, int32_t peer,
                            uint32_t expected, uint32_t seen) {
    return counts_to_look() && has_run_out(workspace, phase, peer, expected, seen);
  }
  // The same in two steps, where it costs something to know the peer.
  __device__ bool counts_to_look() { return (++polls_ & 63) == 0; }
  template <typename Workspace>
  __device__ bool has_run_out(const Workspace& workspace, Phase phase, int32_t peer,
                              uint32_t expected, uint32_t seen) {
    const uint64_t now = now_ns();
    if (started_ == 0) started_ = now;
    if (has_failed(workspace)) return true;
    if (now - started_ <= workspace.timeout_ns) return false;
    record_timeout(workspace, phase, peer, expected, seen);
    return true;
  }

 private:
  uint32_t polls_ = 0;
  uint64_t started_ = 0;
};

}  // namespace moe_ep
