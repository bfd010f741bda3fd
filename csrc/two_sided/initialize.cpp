// Prepares a rank's own segment for its first round.
#include <cstring>

#include "two_sided/cpu.h"
#include "two_sided/segment.h"

namespace moe_ep::two_sided {

void initialize(const WorkspaceView& workspace) {
  const FifoLayout layout = FifoLayout::of(workspace.geometry);
  const Segment own(workspace, layout, workspace.ep_rank);
  // Everything before the slots: epoch 0, nothing signalled, all FIFOs empty.
  std::memset(own.bytes(0), 0, layout.end_of_control());
  ControlBlock& control = own.control();
  control.self_address = reinterpret_cast<uint64_t>(workspace.base);
  control.fingerprint = workspace.geometry.fingerprint();
  control.process = own_process();
  control.magic = kWorkspaceMagic;
}

}  // namespace moe_ep::two_sided
