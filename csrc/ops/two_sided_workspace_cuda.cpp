// Ops on a two-sided workspace outside the exchange, for CUDA tensors, and what its other ops
// share.
#include <torch/csrc/stable/library.h>

#include <limits>

#include "ops/device_rounds.h"
#include "ops/errors.h"
#include "ops/two_sided_cuda.h"

namespace moe_ep::ops {

int32_t num_tokens_of(int64_t rows) {
  return bounded("the number of tokens", rows, 0, std::numeric_limits<int32_t>::max());
}

int32_t tokens_per_rank_of(const char* name, int64_t rows, const two_sided::Geometry& g) {
  check(rows % g.ep_size == 0 && rows / g.ep_size <= g.max_tokens_per_rank, name,
        " must have ep_size=", g.ep_size, " times the tokens_per_rank of prepare, at most ",
        g.max_tokens_per_rank, ", got ", rows, " rows");
  return static_cast<int32_t>(rows / g.ep_size);
}

const int32_t* send_tokens_for(const Tensor& send_tokens, int32_t num_tokens,
                               const Tensor& workspace, const two_sided::WorkspaceView& view) {
  const int32_t* tokens = send_tokens_of(send_tokens, workspace, view);
  check(send_tokens.size(0) == static_cast<int64_t>(num_tokens) * view.geometry.max_destinations(),
        "send_tokens must be what prepare returned in this round");
  return tokens;
}

namespace {

void two_sided_initialize(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank) {
  const two_sided::WorkspaceView view = two_sided_workspace(workspace, geometry, ep_rank);
  const char* reason = two_sided::reason_against(view.geometry);
  check(reason == nullptr, reason, ", got ", view.geometry.slot_bytes);
  const CudaCall call(workspace);
  begin_initialize(view, call);
  check_cuda(two_sided::initialize_on_device(view, call.stream()), "initialising the workspace");
  end_initialize(view, view.base, call);
}

void two_sided_check(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank) {
  check_rounds(two_sided_workspace(workspace, geometry, ep_rank), CudaCall(workspace));
}

void two_sided_forget(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank) {
  DeviceWorkspaces::of_this_process().forget(two_sided_workspace(workspace, geometry, ep_rank),
                                             CudaCall(workspace));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CUDA, m) {
  m.impl("two_sided_initialize", TORCH_BOX(&two_sided_initialize));
  m.impl("two_sided_check", TORCH_BOX(&two_sided_check));
  m.impl("two_sided_forget", TORCH_BOX(&two_sided_forget));
}

}  // namespace moe_ep::ops
