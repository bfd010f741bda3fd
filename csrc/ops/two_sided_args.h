// From op arguments to the plain structs of the two-sided transport, with the checks that keep
// memory safe.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "ops/workspace_args.h"
#include "transport/outcome.h"
#include "two_sided/params.h"
#include "two_sided/segment.h"

namespace moe_ep::ops {

// Checks type and shape; not yet whether it was initialised.
two_sided::WorkspaceView two_sided_workspace(const Tensor& workspace,
                                             const std::vector<int64_t>& geometry, int64_t ep_rank);

WorkspaceRows rows_of(const two_sided::WorkspaceView& workspace);
ControlBlock& initialised_control(const two_sided::WorkspaceView& workspace);

void check_outside_workspace(const char* name, const Tensor& tensor,
                             const two_sided::WorkspaceView& workspace);

two_sided::RoundState& round_state_of(const two_sided::WorkspaceView& workspace);

// Raises unless these are the tokens that this round's prepare returned.
const int32_t* send_tokens_from(const Tensor& send_tokens,
                                const two_sided::WorkspaceView& workspace);

// Raises what an outcome other than kDone and kDisagreement means.
void raise_unless_met(Outcome outcome, const two_sided::WorkspaceView& workspace);

}  // namespace moe_ep::ops
