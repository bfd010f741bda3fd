// The ops moe_ep::two_sided_prepare and two_sided_alltoallv for CUDA tensors. Whether the calls of
// a round follow each other, and with which sizes, only the device knows: here that is up to the
// caller.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "ops/device_workspaces.h"
#include "ops/errors.h"
#include "ops/two_sided_cuda.h"

namespace moe_ep::ops {
namespace {

PrepareOutputs two_sided_prepare(Tensor workspace, Tensor topk_ids, std::vector<int64_t> geometry,
                                 int64_t ep_rank, int64_t invalid_expert_id,
                                 int64_t tokens_per_rank, std::vector<int64_t> row_bytes,
                                 bool has_weights, int64_t timeout_sec) {
  two_sided::PrepareParams p =
      prepare_args({workspace, topk_ids, geometry, ep_rank, invalid_expert_id, tokens_per_rank,
                    row_bytes, has_weights, timeout_sec});
  const CudaCall call(workspace);
  DeviceWorkspaceState& state = begin_call(p.workspace, call);
  PrepareOutputs outputs = fresh_outputs(p, workspace);
  state.runs_on(call);
  check_cuda(two_sided::launch_prepare(p, {call.stream(), state.page}), "launching prepare");
  return outputs;
}

void two_sided_alltoallv(Tensor workspace, std::vector<Tensor> rows, Tensor send_tokens,
                         std::vector<int64_t> geometry, int64_t ep_rank, int64_t timeout_sec,
                         std::vector<Tensor> received, Tensor recv_counts, int64_t max_sm_count) {
  two_sided::AlltoallvParams p{};
  p.workspace = two_sided_workspace(workspace, geometry, ep_rank);
  p.timeout_sec = checked_timeout(timeout_sec);
  check(!rows.empty() && rows.size() <= kMaxPayloads && received.size() == rows.size(),
        "rows and received must have the same number of tensors, 1 to ", kMaxPayloads, ", got ",
        rows.size(), " and ", received.size());
  check(rows[0].dim() == 2 && received[0].dim() == 2, "rows and received must be 2-D");
  p.num_tokens = num_tokens_of(rows[0].size(0));
  p.tokens_per_rank = tokens_per_rank_of("received", received[0].size(0), p.workspace.geometry);
  p.send_tokens = send_tokens_for(send_tokens, p.num_tokens, workspace, p.workspace);
  p.recv_counts = recv_counts_from(recv_counts, workspace, p.workspace);
  set_fields(p, rows, received, workspace);
  const int32_t max_ctas = checked_max_sm_count(max_sm_count);
  const CudaCall call(workspace);
  DeviceWorkspaceState& state = begin_call(p.workspace, call);
  state.runs_on(call);
  check_cuda(two_sided::launch_alltoallv(p, {call.stream(), state.page, max_ctas}),
             "launching alltoallv");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CUDA, m) {
  m.impl("two_sided_prepare", TORCH_BOX(&two_sided_prepare));
  m.impl("two_sided_alltoallv", TORCH_BOX(&two_sided_alltoallv));
}

}  // namespace moe_ep::ops
