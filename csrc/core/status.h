// What a rank records when a round goes wrong. Kernels and CPU code write records; `check()` and
// the end of `combine` turn them into exceptions. Records never stop the process.
#pragma once

#include <cstdint>

#include "core/epoch.h"

namespace moe_ep {

// Why a wait on a peer was given up. On CUDA a kernel finds out the first, kMasksDiffer, kDestroyed,
// kPeerGaveUp and kWentOn.
enum class Missed : uint32_t {
  kDeadline = 0,
  kProcessEnded,  // the peer's
  kPeerGaveUp,    // the peer itself has missed one
  kInterrupted,   // by a signal handler of this process
  kMasksDiffer,   // the peer's rank mask is not this rank's
  kDestroyed,     // the peer's communication
  kWentOn,        // the peer, to a round without this rank, which was still reading its rows
};

// A wait on a peer that did not end well.
struct TimeoutRecord {
  uint32_t recorded;  // 0 or 1; the first of an object is kept. Peers on the CPU read the record
  int32_t peer;
  Phase phase;
  uint32_t epoch_expected;
  uint32_t epoch_seen;
  int32_t timeout_sec;
  Missed why;
  // Where the peer had given up: what began it. Else as above.
  int32_t first_missed;
  Missed first_why;
};

// Expert ids outside [0, num_experts) that are not padding. Their slots send nothing.
struct InvalidIdRecord {
  uint32_t count;       // in the current round
  int32_t num_experts;  // of the layer that the first one was given to
  int32_t token;        // of the first one
  int32_t slot;
  int64_t expert_id;
};

}  // namespace moe_ep
