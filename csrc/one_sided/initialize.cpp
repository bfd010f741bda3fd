// Prepares a rank's own segment for its first round.
#include <cstring>

#include "one_sided/cpu.h"
#include "one_sided/segment.h"

namespace moe_ep::one_sided {

void initialize(const WorkspaceView& workspace) {
  const WorkspaceLayout layout = WorkspaceLayout::of(workspace.geometry);
  const Segment own(workspace, layout, workspace.ep_rank);
  // Everything before the send slots is control, headers and flags: epoch 0, nothing signalled.
  std::memset(own.bytes(0), 0, layout.end_of_control());
  ControlBlock& control = own.control();
  control.self_address = reinterpret_cast<uint64_t>(workspace.base);
  control.fingerprint = workspace.geometry.fingerprint();
  control.process = own_process();
  control.magic = kWorkspaceMagic;
}

}  // namespace moe_ep::one_sided
