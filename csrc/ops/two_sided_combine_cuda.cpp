// The ops moe_ep::two_sided_combine and two_sided_combine_out for CUDA tensors.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "ops/device_rounds.h"
#include "ops/errors.h"
#include "ops/two_sided_cuda.h"

namespace moe_ep::ops {
namespace {

struct Combine {
  two_sided::CombineParams params;
  int32_t max_ctas;
};

Combine combine_of(const Tensor& workspace, const Tensor& expert_output, const Tensor& send_tokens,
                   const std::vector<int64_t>& geometry, int64_t ep_rank, int64_t num_tokens,
                   int64_t hidden_size, int64_t timeout_sec, int64_t max_sm_count) {
  two_sided::CombineParams p{};
  p.workspace = two_sided_workspace(workspace, geometry, ep_rank);
  p.timeout_sec = checked_timeout(timeout_sec);
  p.num_tokens = num_tokens_of(num_tokens);
  p.tokens_per_rank =
      tokens_per_rank_of("expert_output", expert_output.size(0), p.workspace.geometry);
  p.send_tokens = send_tokens_for(send_tokens, p.num_tokens, workspace, p.workspace);
  set_expert_output(p, expert_output, workspace, hidden_size);
  return {p, checked_max_sm_count(max_sm_count)};
}

void run(const Combine& combine, const CudaCall& call) {
  const two_sided::CombineParams& p = combine.params;
  DeviceWorkspaceState& state = begin_call(p.workspace, call);
  close_round(p.workspace, call, state, [&] {
    return two_sided::launch_combine(p, {call.stream(), state.page, combine.max_ctas});
  });
}

Tensor two_sided_combine(Tensor workspace, Tensor expert_output, Tensor send_tokens,
                         std::vector<int64_t> geometry, int64_t ep_rank, int64_t num_tokens,
                         int64_t timeout_sec, int64_t max_sm_count) {
  check(expert_output.dim() == 2, "expert_output must be 2-D, got ", expert_output.dim(), "-D");
  Combine combine = combine_of(workspace, expert_output, send_tokens, geometry, ep_rank, num_tokens,
                               expert_output.size(1), timeout_sec, max_sm_count);
  const CudaCall call(workspace);
  Tensor sums = new_sums(num_tokens, expert_output);
  combine.params.output = static_cast<uint8_t*>(sums.mutable_data_ptr());
  run(combine, call);
  return sums;
}

void two_sided_combine_out(Tensor workspace, Tensor expert_output, Tensor send_tokens,
                           std::vector<int64_t> geometry, int64_t ep_rank, int64_t timeout_sec,
                           Tensor output, int64_t max_sm_count) {
  check(expert_output.dim() == 2, "expert_output must be 2-D, got ", expert_output.dim(), "-D");
  check_output(output, expert_output, workspace, two_sided_workspace(workspace, geometry, ep_rank));
  Combine combine = combine_of(workspace, expert_output, send_tokens, geometry, ep_rank,
                               output.size(0), output.size(1), timeout_sec, max_sm_count);
  const CudaCall call(workspace);
  if (!shares_memory(output, expert_output)) {
    combine.params.output = static_cast<uint8_t*>(output.mutable_data_ptr());
    run(combine, call);
    return;
  }
  Tensor sums = new_sums(output.size(0), expert_output);
  combine.params.output = static_cast<uint8_t*>(sums.mutable_data_ptr());
  const auto bring = [&] {
    const auto bytes = static_cast<size_t>(output.numel()) * output.element_size();
    check_cuda(cudaMemcpyAsync(output.mutable_data_ptr(), combine.params.output, bytes,
                               cudaMemcpyDeviceToDevice, call.stream()),
               "cudaMemcpyAsync");
  };
  try {
    run(combine, call);
  } catch (...) {
    bring();  // what is raised behind the exchange is about other slots
    throw;
  }
  bring();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CUDA, m) {
  m.impl("two_sided_combine", TORCH_BOX(&two_sided_combine));
  m.impl("two_sided_combine_out", TORCH_BOX(&two_sided_combine_out));
}

}  // namespace moe_ep::ops
