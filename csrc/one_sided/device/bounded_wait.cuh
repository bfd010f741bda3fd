// Waits on peers end by wall clock, are recorded, and leave the context alive.
#pragma once

#include <cstdint>

#include "core/device_signal.cuh"
#include "core/epoch.h"
#include "one_sided/device/workspace.cuh"

namespace moe_ep::one_sided {

// Whether a wait has expired on this rank, in this kernel or an earlier one. A racy look is enough:
// who misses it waits for the deadline itself.
__device__ inline bool has_failed(const DeviceWorkspace& workspace) {
  return *const_cast<volatile uint32_t*>(&own_segment(workspace).state()->failed) != 0;
}

// Marks the rank as failed; the first to do so tells the host why.
__device__ inline void record_timeout(const DeviceWorkspace& workspace, Phase phase, int32_t peer,
                                      uint32_t expected, uint32_t seen) {
  if (atomicExch(&own_segment(workspace).state()->failed, 1u) != 0) return;
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
  __device__ bool exhausted(const DeviceWorkspace& workspace, Phase phase, int32_t peer,
                            uint32_t expected, uint32_t seen) {
    return counts_to_look() && has_run_out(workspace, phase, peer, expected, seen);
  }
  // The same in two steps, where it costs something to know the peer.
  __device__ bool counts_to_look() { return (++polls_ & 63) == 0; }
  __device__ bool has_run_out(const DeviceWorkspace& workspace, Phase phase, int32_t peer,
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

}  // namespace moe_ep::one_sided
