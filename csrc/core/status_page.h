// What kernels tell the host without being asked to wait: a page of pinned host memory that a
// kernel writes when something goes wrong and the host reads at the next call. One a workspace.
#pragma once

#include <cstdint>

#include "core/limits.h"
#include "core/rank_mask.h"
#include "core/status.h"
#include "core/workspace_layout.h"

namespace moe_ep {

// The ranks called with arguments that must be the same and are not.
struct DisagreementRecord {
  uint32_t recorded;  // 0 or 1; the first since the host has looked is kept
  Phase phase;
  // Of dispatch: what each rank said. Ranks that are masked off have zeros.
  RoundHeader headers[kMaxEpSize];
};

struct StatusPage {
  TimeoutRecord timeout;
  RankMask masks[kMaxEpSize];  // where they differ: this rank's, and those that it has seen
  InvalidIdRecord invalid_id;  // `count` and the first since the host has looked
  DisagreementRecord disagreement;
};

}  // namespace moe_ep
