// What the ops of every transport do around the rounds of a workspace on a CUDA device.
#pragma once

#include <functional>

#include "ops/cuda_call.h"
#include "ops/device_status.h"
#include "ops/device_workspaces.h"

namespace moe_ep::ops {

// Before the control state is zeroed, and behind it; the latter waits for the stream.
// base: of the workspace, as this rank maps it.
void begin_initialize(const RankWorkspace& workspace, const CudaCall& call);
void end_initialize(const RankWorkspace& workspace, uint8_t* base, const CudaCall& call);

// launch(): queues the call that ends a round. Errors that leave the ranks in step are raised when
// that is done on this rank, too: raising earlier would leave the peers waiting.
template <typename Launch>
void close_round(const RankWorkspace& workspace, const CudaCall& call, DeviceWorkspaceState& state,
                 const Launch& launch) {
  RoundErrors errors;
  // Of the dispatch before, whose peers wait for nothing that this rank has still to do.
  if (!call.is_captured()) errors = RoundErrors(*state.page, call.stream());
  state.runs_on(call);
  check_cuda(launch(), "launching combine");
  if (!call.is_captured()) state.round_has_run = true;
  errors.raise(workspace);
}

// Waits for this rank's rounds and raises what they recorded.
// look(page): launches what finds out more, once they are over.
using LookAround = std::function<cudaError_t(StatusPage* page)>;
void check_rounds(const RankWorkspace& workspace, const CudaCall& call,
                  const LookAround& look = nullptr);

}  // namespace moe_ep::ops
