// The ops dispatch and dispatch_in_place of the one-sided backends for CUDA tensors. Whether
// dispatch and combine alternate and with which sizes, only the device knows: here that is up to
// the caller.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cake/cuda.h"
#include "one_sided/cuda.h"
#include "ops/device_workspaces.h"
#include "ops/dispatch_args.h"
#include "ops/one_sided_backends.h"

namespace moe_ep::ops {
namespace {

template <auto kLaunch>
void launch(const DispatchArgs& args, const CudaCall& call, DeviceWorkspaceState& state,
            bool enable_pdl) {
  state.runs_on(call);
  check_cuda(kLaunch(args.params, {call.stream(), state.page, args.active_on_device, enable_pdl}),
             "launching dispatch");
}

template <auto kLaunch>
DispatchOutputs dispatch(Tensor workspace, Tensor topk_ids, std::optional<Tensor> topk_weights,
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
  launch<kLaunch>(args, call, state, enable_pdl);
  return outputs;
}

template <auto kLaunch>
void dispatch_in_place(Tensor workspace, Tensor topk_ids, std::optional<Tensor> topk_weights,
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
  launch<kLaunch>(args, call, state, enable_pdl);
}

// kLaunch: how a dispatch of the backend goes.
template <auto kLaunch, typename Library>
void implement(Library& m, const char* backend) {
  m.impl(op_of(backend, "dispatch").c_str(), TORCH_BOX(&dispatch<kLaunch>));
  m.impl(op_of(backend, "dispatch_in_place").c_str(), TORCH_BOX(&dispatch_in_place<kLaunch>));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CUDA, m) {
  implement<&cake::launch_dispatch>(m, kCake);
  implement<&one_sided::launch_dispatch>(m, kOneSided);
}

}  // namespace moe_ep::ops
