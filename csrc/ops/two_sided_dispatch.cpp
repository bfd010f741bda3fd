// The ops moe_ep::two_sided_prepare and two_sided_alltoallv for CPU tensors.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "ops/errors.h"
#include "ops/missed_peers.h"
#include "ops/round_errors.h"
#include "ops/two_sided_args.h"
#include "ops/two_sided_host.h"
#include "two_sided/cpu.h"

namespace moe_ep::ops {
namespace {

PrepareOutputs two_sided_prepare(Tensor workspace, Tensor topk_ids, std::vector<int64_t> geometry,
                                 int64_t ep_rank, int64_t invalid_expert_id,
                                 int64_t tokens_per_rank, std::vector<int64_t> row_bytes,
                                 bool has_weights, int64_t timeout_sec) {
  two_sided::PrepareParams p =
      prepare_args({workspace, topk_ids, geometry, ep_rank, invalid_expert_id, tokens_per_rank,
                    row_bytes, has_weights, timeout_sec});
  const ControlBlock& control = initialised_control(p.workspace);
  check_state(control.phase == Phase::kIdle, "prepare was called twice without combine between",
              kEndsOpenRound);
  PrepareOutputs outputs = fresh_outputs(p, workspace);
  const int32_t ep_size = p.workspace.geometry.ep_size;
  std::vector<RoundHeader> headers(static_cast<size_t>(ep_size));
  p.out_headers = headers.data();
  const Outcome outcome = two_sided::prepare(p);
  raise_unless_met(outcome, rows_of(p.workspace));
  if (outcome == Outcome::kDisagreement) raise_dispatch_disagreement(headers.data(), ep_size);
  return outputs;
}

// The fields of a call must be those that prepare announced: the peers count on it.
void check_announced(const two_sided::AlltoallvParams& p, const std::vector<Tensor>& rows,
                     const std::vector<Tensor>& received) {
  const two_sided::FifoLayout layout = two_sided::FifoLayout::of(p.workspace.geometry);
  const RoundHeader& announced = own_segment(p.workspace, layout).round_header(p.workspace.ep_rank);
  check(
      static_cast<int64_t>(rows.size()) == announced.num_payloads && received.size() == rows.size(),
      "rows and received must have a tensor for each of the ", announced.num_payloads,
      " fields of prepare, got ", rows.size(), " and ", received.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].dim() != 2) continue;  // set_fields says so
    const int64_t bytes = rows[i].size(1) * static_cast<int64_t>(rows[i].element_size());
    check(bytes == announced.row_bytes[i], "field ", i, " must have rows of ",
          announced.row_bytes[i], " bytes as prepare said, got ", bytes);
  }
}

// max_sm_count: a call runs on the thread that makes it, there is nothing to limit.
void two_sided_alltoallv(Tensor workspace, std::vector<Tensor> rows, Tensor send_tokens,
                         std::vector<int64_t> geometry, int64_t ep_rank, int64_t timeout_sec,
                         std::vector<Tensor> received, Tensor recv_counts, int64_t max_sm_count) {
  two_sided::AlltoallvParams p{};
  p.workspace = two_sided_workspace(workspace, geometry, ep_rank);
  p.timeout_sec = checked_timeout(timeout_sec);
  checked_max_sm_count(max_sm_count);
  const ControlBlock& control = initialised_control(p.workspace);
  check_state(control.phase == Phase::kDispatch && !rows_are_delivered(p.workspace),
              "alltoallv must follow prepare, once");
  p.num_tokens = control.num_tokens;
  p.tokens_per_rank = control.tokens_per_rank;
  p.send_tokens = send_tokens_of_round(send_tokens, workspace, p.workspace);
  p.recv_counts = recv_counts_from(recv_counts, workspace, p.workspace);
  check_announced(p, rows, received);
  set_fields(p, rows, received, workspace);
  raise_unless_met(two_sided::alltoallv(p), rows_of(p.workspace));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CPU, m) {
  m.impl("two_sided_prepare", TORCH_BOX(&two_sided_prepare));
  m.impl("two_sided_alltoallv", TORCH_BOX(&two_sided_alltoallv));
}

}  // namespace moe_ep::ops
