// The ops moe_ep::two_sided_combine and two_sided_combine_out for CPU tensors.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ops/errors.h"
#include "ops/round_errors.h"
#include "ops/tensor_args.h"
#include "ops/two_sided_args.h"
#include "two_sided/cpu.h"

namespace moe_ep::ops {
namespace {

two_sided::CombineParams combine_params(const Tensor& workspace, const Tensor& expert_output,
                                        const Tensor& send_tokens,
                                        const std::vector<int64_t>& geometry, int64_t ep_rank,
                                        int64_t num_tokens, int64_t hidden_size,
                                        int64_t timeout_sec) {
  two_sided::CombineParams p{};
  p.workspace = two_sided_workspace(workspace, geometry, ep_rank);
  p.timeout_sec = checked_timeout(timeout_sec);
  const ControlBlock& control = initialised_control(p.workspace);
  check_state(control.phase == Phase::kDispatch && round_state_of(p.workspace).rows_delivered == 1,
              "combine was called before alltoallv");
  check(num_tokens == control.num_tokens,
        "combine must be called with the num_tokens=", control.num_tokens, " of its dispatch, got ",
        num_tokens);
  p.num_tokens = control.num_tokens;
  p.tokens_per_rank = control.tokens_per_rank;
  p.send_tokens = send_tokens_from(send_tokens, p.workspace);
  p.row_type = row_type_from(expert_output.scalar_type());
  check(hidden_size >= 1 && hidden_size <= kMaxSegmentBytes, "hidden_size must be in [1, ",
        kMaxSegmentBytes, "], got ", hidden_size);
  p.hidden_size = hidden_size;
  const int64_t num_rows = static_cast<int64_t>(p.workspace.geometry.ep_size) * p.tokens_per_rank;
  p.expert_output = expert_output_from(expert_output, workspace, expert_output.scalar_type(),
                                       num_rows, hidden_size);
  check_outside_workspace("expert_output", expert_output, p.workspace);
  return p;
}

void run(const two_sided::CombineParams& p) {
  const Outcome outcome = two_sided::combine(p);
  raise_unless_met(outcome, p.workspace);
  if (outcome == Outcome::kDisagreement) {
    raise_combine_disagreement("; this rank's have " + std::to_string(p.hidden_size) +
                               " elements of " + std::to_string(row_type_bytes(p.row_type)) +
                               " bytes");
  }
}

// When the round is closed on all ranks: raising earlier would leave the peers waiting.
void raise_recorded_ids(const two_sided::WorkspaceView& workspace) {
  ControlBlock& control = initialised_control(workspace);
  const InvalidIdRecord invalid = control.invalid_id;
  control.invalid_id.count = 0;
  if (invalid.count == 0) return;
  raise_invalid_ids(invalid, workspace.ep_rank, workspace.geometry.num_experts);
}

Tensor new_sums(int64_t num_tokens, int64_t hidden_size, ScalarType dtype) {
  return torch::stable::empty({num_tokens, hidden_size}, dtype);
}

Tensor two_sided_combine(Tensor workspace, Tensor expert_output, Tensor send_tokens,
                         std::vector<int64_t> geometry, int64_t ep_rank, int64_t num_tokens,
                         int64_t timeout_sec) {
  check(expert_output.dim() == 2, "expert_output must be 2-D, got ", expert_output.dim(), "-D");
  two_sided::CombineParams p =
      combine_params(workspace, expert_output, send_tokens, geometry, ep_rank, num_tokens,
                     expert_output.size(1), timeout_sec);
  Tensor sums = new_sums(num_tokens, p.hidden_size, expert_output.scalar_type());
  p.output = static_cast<uint8_t*>(sums.mutable_data_ptr());
  run(p);
  raise_recorded_ids(p.workspace);
  return sums;
}

void two_sided_combine_out(Tensor workspace, Tensor expert_output, Tensor send_tokens,
                           std::vector<int64_t> geometry, int64_t ep_rank, int64_t timeout_sec,
                           Tensor output) {
  check_sums(output);
  check_device("output", output, workspace);
  check_dtype(output.scalar_type() == expert_output.scalar_type(),
              "expert_output must have the output's dtype");
  two_sided::CombineParams p = combine_params(workspace, expert_output, send_tokens, geometry,
                                              ep_rank, output.size(0), output.size(1), timeout_sec);
  check_outside_workspace("output", output, p.workspace);
  auto* to = static_cast<uint8_t*>(output.mutable_data_ptr());
  const int64_t bytes = output.numel() * static_cast<int64_t>(output.element_size());
  // Rows leave while sums are formed: a sum must not be written where a row still waits.
  if (!overlaps(expert_output, to, to + bytes)) {
    p.output = to;
    run(p);
  } else {
    Tensor sums = new_sums(p.num_tokens, p.hidden_size, output.scalar_type());
    p.output = static_cast<uint8_t*>(sums.mutable_data_ptr());
    run(p);
    std::copy_n(p.output, bytes, to);
  }
  raise_recorded_ids(p.workspace);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CPU, m) {
  m.impl("two_sided_combine", TORCH_BOX(&two_sided_combine));
  m.impl("two_sided_combine_out", TORCH_BOX(&two_sided_combine_out));
}

}  // namespace moe_ep::ops
