// What a wait on the CPU says that did not end well, in words. There the control blocks of the
// peers can be read, too.
#pragma once

#include "ops/workspace_args.h"
#include "transport/outcome.h"

namespace moe_ep::ops {

// Raises what the control block of this rank has recorded: MoEEpTimeoutError, or
// MoEEpMaskDisagreementError with the mask of each rank that this one counts on.
[[noreturn]] void raise_missed(const WorkspaceRows& workspace);

// Raises what an outcome means that was no meeting of the ranks. After one, each op knows what that
// means.
void raise_unless_met(Outcome outcome, const WorkspaceRows& workspace);

}  // namespace moe_ep::ops
