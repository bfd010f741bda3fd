// The ops combine, combine_out, combine_quantized and abandon of the one-sided backends for CPU
// tensors.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>
#include <tuple>

#include "one_sided/cpu.h"
#include "ops/combine_args.h"
#include "ops/errors.h"
#include "ops/missed_peers.h"
#include "ops/one_sided_backends.h"
#include "ops/parallel.h"
#include "ops/round_errors.h"
#include "ops/tensor_args.h"
#include "transport/reduce_rows.h"

namespace moe_ep::ops {
namespace {

ControlBlock& control_of_round(const one_sided::CombineParams& p) {
  ControlBlock& control = initialised_control(p.workspace);
  check_state(control.phase == Phase::kDispatch, "combine was called before dispatch");
  check(p.num_tokens == control.num_tokens && p.tokens_per_rank == control.tokens_per_rank,
        "combine must be called with the sizes of its dispatch, num_tokens=", control.num_tokens,
        " and tokens_per_rank=", control.tokens_per_rank, ", got ", p.num_tokens, " and ",
        p.tokens_per_rank);
  if (!(p.active == control.active)) {
    const int32_t ep_size = p.workspace.geometry.ep_size;
    fail("MoEEpConfigError", "active_rank_mask must be the one that dispatch got, with ranks ",
         ranks_in(control.active, ep_size), ", got one with ranks ", ranks_in(p.active, ep_size),
         ": call combine again with that one");
  }
  return control;
}

void run(const one_sided::CombineParams& p, ControlBlock& control) {
  switch (one_sided::combine(p, torch_parallel_for())) {
    case Outcome::kDone:
      break;
    case Outcome::kTimeout:
      raise_missed(rows_of(p.workspace));
    case Outcome::kInterrupted:
      raise_interrupt();
    case Outcome::kDisagreement:
      raise_combine_disagreement("; this rank's have " + std::to_string(p.hidden_size) +
                                 " elements of " + std::to_string(row_type_bytes(p.row_type)) +
                                 " bytes" + (p.low_precision ? ", which travel as FP8" : ""));
    case Outcome::kAbandoned:
      raise_abandoned(one_sided::who_abandoned(p.workspace), p.workspace.geometry.ep_size);
  }
  // Only now, when the round is closed on all ranks: raising earlier would leave the peers waiting.
  const InvalidIdRecord invalid = control.invalid_id;
  control.invalid_id.count = 0;
  if (invalid.count == 0) return;
  raise_invalid_ids(invalid, p.workspace.ep_rank);
}

Tensor combine(Tensor workspace, std::optional<Tensor> expert_output,
               std::optional<Tensor> active_rank_mask, std::vector<int64_t> geometry,
               int64_t ep_rank, int64_t num_tokens, int64_t tokens_per_rank, int64_t hidden_size,
               ScalarType dtype, int64_t timeout_sec, bool /*enable_pdl*/, bool low_precision) {
  const CombineInputs inputs{workspace, expert_output, active_rank_mask, geometry,
                             ep_rank,   num_tokens,    tokens_per_rank,  hidden_size,
                             dtype,     timeout_sec,   low_precision};
  one_sided::CombineParams p = combine_args(inputs);
  ControlBlock& control = control_of_round(p);
  Tensor output = fresh_sums(p, inputs);
  run(p, control);
  return output;
}

void combine_out(Tensor workspace, std::optional<Tensor> expert_output,
                 std::optional<Tensor> active_rank_mask, std::vector<int64_t> geometry,
                 int64_t ep_rank, int64_t tokens_per_rank, int64_t timeout_sec, Tensor output,
                 bool /*enable_pdl*/, bool low_precision) {
  check_sums(output);
  one_sided::CombineParams p = combine_args(
      {workspace, expert_output, active_rank_mask, geometry, ep_rank, output.size(0),
       tokens_per_rank, output.size(1), output.scalar_type(), timeout_sec, low_precision});
  ControlBlock& control = control_of_round(p);
  set_sums(p, output, workspace);
  run(p, control);
}

std::tuple<Tensor, Tensor> combine_quantized(
    Tensor workspace, std::optional<Tensor> expert_output, std::optional<Tensor> active_rank_mask,
    std::vector<int64_t> geometry, int64_t ep_rank, int64_t num_tokens, int64_t tokens_per_rank,
    int64_t hidden_size, ScalarType dtype, int64_t timeout_sec, int64_t format,
    int64_t scale_layout, double scalar_scale, bool /*enable_pdl*/, bool low_precision) {
  const CombineInputs inputs{workspace, expert_output, active_rank_mask, geometry,
                             ep_rank,   num_tokens,    tokens_per_rank,  hidden_size,
                             dtype,     timeout_sec,   low_precision};
  one_sided::CombineParams p = combine_args(inputs);
  ControlBlock& control = control_of_round(p);
  QuantizedSums sums = fresh_quantized_sums(inputs, format, scale_layout, scalar_scale);
  p.quantized = &sums.rows;
  run(p, control);
  return {sums.values, sums.scales};
}

void abandon(Tensor workspace, std::vector<int64_t> geometry, int64_t ep_rank,
             int64_t timeout_sec) {
  const one_sided::WorkspaceView view = workspace_from(workspace, geometry_from(geometry), ep_rank);
  check_state(initialised_control(view).phase == Phase::kDispatch,
              "abandon was called before dispatch");
  const Outcome outcome = one_sided::abandon(view, checked_timeout(timeout_sec));
  if (outcome == Outcome::kTimeout) raise_missed(rows_of(view));
  if (outcome == Outcome::kInterrupted) raise_interrupt();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CPU, m) {
  implement_for_each(m, "abandon", TORCH_BOX(&abandon));
  implement_for_each(m, "combine", TORCH_BOX(&combine));
  implement_for_each(m, "combine_out", TORCH_BOX(&combine_out));
  implement_for_each(m, "combine_quantized", TORCH_BOX(&combine_quantized));
}

}  // namespace moe_ep::ops
