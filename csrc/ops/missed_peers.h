// What a wait on the CPU says that did not end well, in words. There the control blocks of the
// peers can be read, too.
#pragma once

#include "ops/workspace_args.h"

namespace moe_ep::ops {

// Raises what the control block of this rank has recorded: MoEEpTimeoutError, or
// MoEEpMaskDisagreementError with the mask of each rank that this one counts on.
[[noreturn]] void raise_missed(const WorkspaceRows& workspace);

}  // namespace moe_ep::ops
