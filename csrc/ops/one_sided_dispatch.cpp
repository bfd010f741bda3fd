// The ops dispatch and dispatch_in_place of the one-sided backends for CPU tensors.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "one_sided/cpu.h"
#include "ops/dispatch_args.h"
#include "ops/errors.h"
#include "ops/missed_peers.h"
#include "ops/one_sided_backends.h"
#include "ops/parallel.h"
#include "ops/round_errors.h"

namespace moe_ep::ops {
namespace {

void check_phase(const one_sided::DispatchParams& p) {
  const ControlBlock& control = initialised_control(p.workspace);
  check_state(control.phase == Phase::kIdle, "dispatch was called twice without combine between",
              kEndsOpenRound);
}

void run(one_sided::DispatchParams& p) {
  std::vector<RoundHeader> headers(static_cast<size_t>(p.workspace.geometry.ep_size));
  p.out_headers = headers.data();
  const Outcome outcome = one_sided::dispatch(p, torch_parallel_for());
  raise_unless_met(outcome, rows_of(p.workspace));
  if (outcome == Outcome::kDisagreement) {
    raise_dispatch_disagreement(headers.data(), p.workspace.geometry.ep_size);
  }
}

DispatchOutputs dispatch(Tensor workspace, Tensor topk_ids, std::optional<Tensor> topk_weights,
                         std::vector<Tensor> payloads, std::optional<Tensor> eplb_local_stats,
                         std::optional<Tensor> active_rank_mask, std::vector<int64_t> geometry,
                         int64_t ep_rank, int64_t invalid_expert_id, int64_t tokens_per_rank,
                         int64_t timeout_sec, bool /*enable_pdl*/) {
  DispatchArgs args = dispatch_args({workspace, topk_ids, topk_weights, payloads, eplb_local_stats,
                                     active_rank_mask, geometry, ep_rank, invalid_expert_id,
                                     tokens_per_rank, timeout_sec});
  check_phase(args.params);
  DispatchOutputs outputs = fresh_outputs(args.params, workspace);
  run(args.params);
  return outputs;
}

void dispatch_in_place(Tensor workspace, Tensor topk_ids, std::optional<Tensor> topk_weights,
                       std::vector<Tensor> payloads, std::optional<Tensor> eplb_local_stats,
                       std::optional<Tensor> active_rank_mask, std::vector<int64_t> geometry,
                       int64_t ep_rank, int64_t invalid_expert_id, int64_t tokens_per_rank,
                       int64_t timeout_sec, bool /*enable_pdl*/) {
  DispatchArgs args = dispatch_args({workspace, topk_ids, topk_weights, payloads, eplb_local_stats,
                                     active_rank_mask, geometry, ep_rank, invalid_expert_id,
                                     tokens_per_rank, timeout_sec});
  check_phase(args.params);
  leave_in_workspace(args.params);
  run(args.params);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CPU, m) {
  implement_for_each(m, "dispatch", TORCH_BOX(&dispatch));
  implement_for_each(m, "dispatch_in_place", TORCH_BOX(&dispatch_in_place));
}

}  // namespace moe_ep::ops
