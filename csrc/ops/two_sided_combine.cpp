// The ops moe_ep::two_sided_combine, two_sided_combine_out and two_sided_abandon for CPU tensors.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ops/errors.h"
#include "ops/round_errors.h"
#include "ops/two_sided_args.h"
#include "ops/two_sided_host.h"
#include "two_sided/cpu.h"

namespace moe_ep::ops {
namespace {

two_sided::CombineParams combine_params(const Tensor& workspace, const Tensor& expert_output,
                                        const Tensor& send_tokens,
                                        const std::vector<int64_t>& geometry, int64_t ep_rank,
                                        int64_t num_tokens, int64_t hidden_size,
                                        int64_t timeout_sec, int64_t max_sm_count) {
  two_sided::CombineParams p{};
  p.workspace = two_sided_workspace(workspace, geometry, ep_rank);
  p.timeout_sec = checked_timeout(timeout_sec);
  checked_max_sm_count(max_sm_count);  // nothing to limit, see two_sided_alltoallv
  const ControlBlock& control = initialised_control(p.workspace);
  check_state(control.phase == Phase::kDispatch && rows_are_delivered(p.workspace),
              "combine was called before alltoallv");
  check(num_tokens == control.num_tokens,
        "combine must be called with the num_tokens=", control.num_tokens, " of its dispatch, got ",
        num_tokens);
  p.num_tokens = control.num_tokens;
  p.tokens_per_rank = control.tokens_per_rank;
  p.send_tokens = send_tokens_of_round(send_tokens, workspace, p.workspace);
  set_expert_output(p, expert_output, workspace, hidden_size);
  return p;
}

void run(const two_sided::CombineParams& p) {
  const Outcome outcome = two_sided::combine(p);
  raise_unless_met(outcome, p.workspace);
  if (outcome == Outcome::kAbandoned) {
    raise_abandoned(two_sided::who_abandoned(p.workspace), p.workspace.geometry.ep_size);
  }
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
  raise_invalid_ids(invalid, workspace.ep_rank);
}

Tensor two_sided_combine(Tensor workspace, Tensor expert_output, Tensor send_tokens,
                         std::vector<int64_t> geometry, int64_t ep_rank, int64_t num_tokens,
                         int64_t timeout_sec, int64_t max_sm_count) {
  check(expert_output.dim() == 2, "expert_output must be 2-D, got ", expert_output.dim(), "-D");
  two_sided::CombineParams p =
      combine_params(workspace, expert_output, send_tokens, geometry, ep_rank, num_tokens,
                     expert_output.size(1), timeout_sec, max_sm_count);
  Tensor sums = new_sums(p.num_tokens, expert_output);
  p.output = static_cast<uint8_t*>(sums.mutable_data_ptr());
  run(p);
  raise_recorded_ids(p.workspace);
  return sums;
}

void two_sided_combine_out(Tensor workspace, Tensor expert_output, Tensor send_tokens,
                           std::vector<int64_t> geometry, int64_t ep_rank, int64_t timeout_sec,
                           Tensor output, int64_t max_sm_count) {
  check_output(output, expert_output, workspace, two_sided_workspace(workspace, geometry, ep_rank));
  two_sided::CombineParams p =
      combine_params(workspace, expert_output, send_tokens, geometry, ep_rank, output.size(0),
                     output.size(1), timeout_sec, max_sm_count);
  auto* to = static_cast<uint8_t*>(output.mutable_data_ptr());
  if (!shares_memory(output, expert_output)) {
    p.output = to;
    run(p);
  } else {
    Tensor sums = new_sums(p.num_tokens, expert_output);
    p.output = static_cast<uint8_t*>(sums.mutable_data_ptr());
    run(p);
    std::copy_n(p.output, output.numel() * static_cast<int64_t>(output.element_size()), to);
  }
  raise_recorded_ids(p.workspace);
}

void two_sided_abandon(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank,
                       int64_t timeout_sec) {
  const two_sided::WorkspaceView view = two_sided_workspace(workspace, geometry, ep_rank);
  check_state(initialised_control(view).phase == Phase::kDispatch && rows_are_delivered(view),
              "abandon was called before alltoallv");
  raise_unless_met(two_sided::abandon(view, checked_timeout(timeout_sec)), view);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CPU, m) {
  m.impl("two_sided_abandon", TORCH_BOX(&two_sided_abandon));
  m.impl("two_sided_combine", TORCH_BOX(&two_sided_combine));
  m.impl("two_sided_combine_out", TORCH_BOX(&two_sided_combine_out));
}

}  // namespace moe_ep::ops
