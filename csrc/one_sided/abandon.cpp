// The end of a round in which a rank has no expert outputs for its peers.
#include "transport/abandon.h"

#include "one_sided/cpu.h"
#include "one_sided/segment.h"

namespace moe_ep::one_sided {

Outcome abandon(const WorkspaceView& workspace, int32_t timeout_sec) {
  return abandon_round<Segment, WorkspaceLayout>(workspace, timeout_sec);
}

RankMask who_abandoned(const WorkspaceView& workspace) {
  return ranks_that_abandoned<Segment, WorkspaceLayout>(workspace);
}

}  // namespace moe_ep::one_sided
