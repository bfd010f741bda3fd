// The ops moe_ep::cake_dispatch and cake_dispatch_in_place for CUDA tensors. Whether dispatch and
// combine alternate and with which sizes, only the device knows: here that is up to the caller.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "one_sided/cuda.h"
#include "ops/device_workspaces.h"
#include "ops/dispatch_args.h"

namespace moe_ep::ops {
namespace {

void launch(const DispatchArgs& args, const CudaCall& call, DeviceWorkspaceState& state,
            bool enable_pdl) {
  state.runs_on(call);
  check_cuda(one_sided::launch_dispatch(
                 args.params, {call.stream(), state.page, args.active_on_device, enable_pdl}),
             "launching dispatch");
}

DispatchOutputs cake_dispatch(Tensor workspace, Tensor topk_ids, std::optional<Tensor> topk_weights,
                              std::vector<Tensor> payloads, std::optional<Tensor> eplb_local_stats,
                              std::optional<Tensor> active_rank_mask, std::vector<int64_t> geometry,
                              int64_t ep_rank, int64_t invalid_expert_id, int64_t tokens_per_rank,
                              int64_t timeout_sec, bool enable_pdl) {
  DispatchArgs args = dispatch_args({workspace, topk_ids, topk_weights, payloads, eplb_local_stats,
                                     active_rank_mask, geometry, ep_rank, invalid_expert_id,
                                     tokens_per_rank, timeout_sec});
  const CudaCall call(workspace);
  DeviceWorkspaceState& state = begin_call(args.params.workspace, call);
  DispatchOutputs outputs = fresh_outputs(args.params, workspace);
  launch(args, call, state, enable_pdl);
  return outputs;
}

void cake_dispatch_in_place(Tensor workspace, Tensor topk_ids, std::optional<Tensor> topk_weights,
                            std::vector<Tensor> payloads, std::optional<Tensor> eplb_local_stats,
                            std::optional<Tensor> active_rank_mask, std::vector<int64_t> geometry,
                            int64_t ep_rank, int64_t invalid_expert_id, int64_t tokens_per_rank,
                            int64_t timeout_sec, bool enable_pdl) {
  DispatchArgs args = dispatch_args({workspace, topk_ids, topk_weights, payloads, eplb_local_stats,
                                     active_rank_mask, geometry, ep_rank, invalid_expert_id,
                                     tokens_per_rank, timeout_sec});
  const CudaCall call(workspace);
  DeviceWorkspaceState& state = begin_call(args.params.workspace, call);
  leave_in_workspace(args.params);
  launch(args, call, state, enable_pdl);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CUDA, m) {
  m.impl("cake_dispatch", TORCH_BOX(&cake_dispatch));
  m.impl("cake_dispatch_in_place", TORCH_BOX(&cake_dispatch_in_place));
}

}  // namespace moe_ep::ops
