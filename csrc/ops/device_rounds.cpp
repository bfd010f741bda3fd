#include "ops/device_rounds.h"

#include <torch/csrc/stable/library.h>

#include "core/workspace_layout.h"
#include "ops/errors.h"
#include "ops/workspace_args.h"

namespace moe_ep::ops {

void begin_initialize(const RankWorkspace& workspace, const CudaCall& call) {
  check_state(!call.is_captured(), "a workspace cannot be initialised in a CUDA graph");
  DeviceWorkspaces::of_this_process().add(workspace, call);
}

void end_initialize(const RankWorkspace& workspace, uint8_t* base, const CudaCall& call) {
  // For copies of it, which the process does not know: see DeviceWorkspaces::find.
  ControlBlock control{};
  control.magic = kWorkspaceMagic;
  control.self_address = reinterpret_cast<uint64_t>(base);
  control.fingerprint = workspace.fingerprint;
  check_cuda(cudaMemcpyAsync(const_cast<uint8_t*>(workspace.own_segment), &control, sizeof control,
                             cudaMemcpyHostToDevice, call.stream()),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(call.stream()), "cudaStreamSynchronize");
}

void check_rounds(const RankWorkspace& workspace, const CudaCall& call, const LookAround& look) {
  check_state(!call.is_captured(),
              "check() waits for the device, which a CUDA graph cannot: call it after the graph");
  DeviceWorkspaceState& state = DeviceWorkspaces::of_this_process().find(workspace, call);
  check_cuda(state.wait(call), "waiting for the device");
  raise_timeout_again(state, workspace);
  if (look != nullptr && workspace.ep_size > 1) {
    check_cuda(look(state.page), "looking at the other ranks");
    check_cuda(cudaStreamSynchronize(call.stream()), "waiting for the device");
    raise_timeout_again(state, workspace);
  }
  RoundErrors(*state.page, call.stream()).raise(workspace);
}

namespace {

// Of an initialised workspace of any transport, which begins with the segments' control blocks.
void leave_workspace(Tensor workspace, int64_t ep_rank) {
  const auto bytes = static_cast<int64_t>(sizeof(ControlBlock));
  const WorkspaceRows rows = workspace_rows(workspace, workspace.size(0), bytes, ep_rank);
  DeviceWorkspaces::of_this_process().leave(rows.base + ep_rank * rows.rank_stride,
                                            CudaCall(workspace));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CUDA, m) { m.impl("leave", TORCH_BOX(&leave_workspace)); }

}  // namespace moe_ep::ops
