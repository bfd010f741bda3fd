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

}  // namespace moe_ep::one_sided
