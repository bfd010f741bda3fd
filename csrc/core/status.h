// What a rank records when a round goes wrong. Kernels and CPU code write records; `check()` and
// the end of `combine` turn them into exceptions. Records never stop the process.
#pragma once

#include <cstdint>

#include "core/epoch.h"

namespace moe_ep {

// A wait on a peer that did not end before its deadline.
struct TimeoutRecord {
  uint32_t recorded;  // 0 or 1; the first time-out of an object is kept
  int32_t peer;
  Phase phase;
  uint32_t epoch_expected;
  uint32_t epoch_seen;
  int32_t timeout_sec;
};

// Expert ids outside [0, num_experts) that are not padding. Their slots send nothing.
struct InvalidIdRecord {
  uint32_t count;  // in the current round
  int32_t token;   // of the first one
  int32_t slot;
  int64_t expert_id;
};

}  // namespace moe_ep
