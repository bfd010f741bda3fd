// The two-sided transport between ranks that are processes (or threads) on CPUs.
#pragma once

#include <cstdint>

#include "core/rank_mask.h"
#include "transport/outcome.h"
#include "two_sided/params.h"

namespace moe_ep::two_sided {

// Zeroes this rank's control state. The other ranks may signal only after all ranks have done this.
void initialize(const WorkspaceView& workspace);

// Of the tokens for all ranks together, as prepare computes it.
uint64_t hash_of_tokens(const int32_t* send_tokens, int64_t count);

// A round: all ranks agree on it and learn how many rows come from whom; the rows of dispatch; the
// rows of the experts, and their sums.
Outcome prepare(const PrepareParams& params);
Outcome alltoallv(const AlltoallvParams& params);
Outcome combine(const CombineParams& params);

// In place of combine, by a rank that has no rows for its peers: see Agreement.
Outcome abandon(const WorkspaceView& workspace, int32_t timeout_sec);
// After either of them has returned kAbandoned.
RankMask who_abandoned(const WorkspaceView& workspace);

}  // namespace moe_ep::two_sided
