// The one-sided transport between ranks that are processes (or threads) on CPUs.
#pragma once

#include "one_sided/params.h"
#include "transport/outcome.h"
#include "transport/parallel_for.h"

namespace moe_ep::one_sided {

// Zeroes this rank's control state. The other ranks may signal only after all ranks have done this.
void initialize(const WorkspaceView& workspace);

Outcome dispatch(const DispatchParams& params, const ParallelFor& parallel_for);
Outcome combine(const CombineParams& params, const ParallelFor& parallel_for);

// In place of combine, by a rank that has no rows for its peers: see Agreement.
Outcome abandon(const WorkspaceView& workspace, int32_t timeout_sec);
// After either of them has returned kAbandoned.
RankMask who_abandoned(const WorkspaceView& workspace);

}  // namespace moe_ep::one_sided
