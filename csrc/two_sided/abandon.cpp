// The end of a round in which a rank has no expert outputs for its peers. No row moves: senders and
// receivers all learn of it before they touch a FIFO.
#include "transport/abandon.h"

#include "two_sided/cpu.h"
#include "two_sided/segment.h"

namespace moe_ep::two_sided {

Outcome abandon(const WorkspaceView& workspace, int32_t timeout_sec) {
  return abandon_round<Segment, FifoLayout>(workspace, timeout_sec);
}

RankMask who_abandoned(const WorkspaceView& workspace) {
  return ranks_that_abandoned<Segment, FifoLayout>(workspace);
}

}  // namespace moe_ep::two_sided
