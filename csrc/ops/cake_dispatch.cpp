// The op moe_ep::cake_dispatch for CPU tensors.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <limits>
#include <sstream>
#include <tuple>

#include "cake/cpu.h"
#include "ops/errors.h"
#include "ops/parallel.h"
#include "ops/workspace_args.h"

namespace moe_ep::ops {
namespace {

cake::RowsIn rows_from(const Tensor& payload, int64_t num_tokens,
                       const cake::WorkspaceView& workspace) {
  check_outside_workspace("a payload", payload, workspace);
  check(payload.dim() == 2 && payload.size(0) == num_tokens,
        "each payload must be 2-D with a row for each of the ", num_tokens, " tokens");
  const auto element = static_cast<int64_t>(payload.element_size());
  check(payload.size(1) <= 1 || payload.stride(1) == 1, "the rows of a payload must be dense");
  return {static_cast<const uint8_t*>(payload.const_data_ptr()), payload.size(1) * element,
          payload.stride(0) * element};
}

void set_routing(cake::DispatchParams& p, const Tensor& topk_ids,
                 const std::optional<Tensor>& topk_weights) {
  const Geometry& g = p.workspace.geometry;
  p.ids_are_int64 = topk_ids.scalar_type() == ScalarType::Long;
  check_dtype(p.ids_are_int64 || topk_ids.scalar_type() == ScalarType::Int,
              "topk_ids must be int32 or int64");
  check(topk_ids.dim() == 2 && topk_ids.size(1) == g.top_k && topk_ids.is_contiguous(),
        "topk_ids must be contiguous [num_tokens, top_k=", g.top_k, "]");
  check(topk_ids.size(0) <= p.tokens_per_rank, "topk_ids has ", topk_ids.size(0),
        " rows, more than tokens_per_rank=", p.tokens_per_rank);
  p.num_tokens = static_cast<int32_t>(topk_ids.size(0));
  p.topk_ids = topk_ids.const_data_ptr();
  if (!topk_weights.has_value()) return;
  check_dtype(topk_weights->scalar_type() == ScalarType::Float, "topk_weights must be float32");
  check(topk_weights->is_contiguous() && topk_weights->dim() == 2 &&
            topk_weights->size(0) == p.num_tokens && topk_weights->size(1) == g.top_k,
        "topk_weights must be contiguous, of the shape of topk_ids");
  p.has_weights = true;
  p.topk_weights = static_cast<const float*>(topk_weights->const_data_ptr());
}

void set_payloads(cake::DispatchParams& p, const std::vector<Tensor>& payloads) {
  check(!payloads.empty() && payloads.size() <= kMaxPayloads, "payloads must be 1 to ",
        kMaxPayloads, " tensors, got ", payloads.size());
  int64_t bytes = 0;
  for (const Tensor& payload : payloads) {
    p.payloads[p.num_payloads] = rows_from(payload, p.num_tokens, p.workspace);
    bytes += p.payloads[p.num_payloads++].row_bytes;
  }
  check(bytes <= p.workspace.geometry.dispatch_bytes_per_token, "the payload rows of a token have ",
        bytes, " bytes, more than dispatch_bytes_per_token=",
        p.workspace.geometry.dispatch_bytes_per_token);
}

[[noreturn]] void raise_disagreement(const cake::DispatchParams& p) {
  std::ostringstream table;
  for (int32_t rank = 0; rank < p.workspace.geometry.ep_size; ++rank) {
    if (!p.active.contains(rank)) continue;
    const RoundHeader& header = p.out_headers[rank];
    table << "\n  rank " << rank << ": tokens_per_rank=" << header.tokens_per_rank
          << ", topk_weights " << (header.has_weights ? "given" : "None") << ", eplb_local_stats "
          << (header.has_stats ? "given" : "None") << ", payload row bytes";
    for (int32_t i = 0; i < header.num_payloads; ++i) table << ' ' << header.row_bytes[i];
  }
  fail("MoEEpConfigError",
       "the ranks called dispatch with different arguments; no data was delivered. "
       "runtime_max_tokens_per_rank, the row widths and whether topk_weights and eplb_local_stats "
       "are given must be the same on all ranks:",
       table.str());
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cake_dispatch(
    Tensor workspace, Tensor topk_ids, std::optional<Tensor> topk_weights,
    std::vector<Tensor> payloads, std::optional<Tensor> eplb_local_stats,
    std::optional<Tensor> active_rank_mask, std::vector<int64_t> geometry, int64_t ep_rank,
    int64_t invalid_expert_id, int64_t tokens_per_rank, int64_t timeout_sec) {
  cake::DispatchParams p{};
  p.workspace = workspace_from(workspace, geometry_from(geometry), ep_rank);
  const Geometry& g = p.workspace.geometry;
  p.active = active_ranks_from(active_rank_mask, g, ep_rank);
  p.tokens_per_rank = checked_tokens_per_rank(tokens_per_rank, g);
  p.timeout_sec = checked_timeout(timeout_sec);
  check(invalid_expert_id >= std::numeric_limits<int32_t>::min() &&
            invalid_expert_id <= std::numeric_limits<int32_t>::max() &&
            (invalid_expert_id < 0 || invalid_expert_id >= g.num_experts),
        "invalid_expert_id must be an int32 outside [0, ", g.num_experts, "), got ",
        invalid_expert_id);
  p.invalid_expert_id = invalid_expert_id;
  set_routing(p, topk_ids, topk_weights);
  set_payloads(p, payloads);
  if (g.eplb_stats_num_experts > 0 && eplb_local_stats.has_value()) {
    check_dtype(eplb_local_stats->scalar_type() == ScalarType::Int,
                "eplb_local_stats must be int32");
    check(
        eplb_local_stats->is_contiguous() && eplb_local_stats->numel() == g.eplb_stats_num_experts,
        "eplb_local_stats must be contiguous [", g.eplb_stats_num_experts, "]");
    p.eplb_local_stats = static_cast<const int32_t*>(eplb_local_stats->const_data_ptr());
  } else {
    check(!eplb_local_stats.has_value(),
          "eplb_local_stats needs a communication with eplb_stats_num_experts > 0");
  }
  const ControlBlock& control = initialised_control(p.workspace);
  check_state(control.phase == Phase::kIdle, "dispatch was called twice without combine between");

  using torch::stable::empty;
  const int64_t rows = g.ep_size * tokens_per_rank;
  const int64_t weights_k = p.has_weights ? g.top_k : 0;
  const int64_t stats_ranks = p.eplb_local_stats != nullptr ? g.ep_size : 0;
  const int64_t stats_experts = p.eplb_local_stats != nullptr ? g.eplb_stats_num_experts : 0;
  Tensor out_ids = empty({rows, static_cast<int64_t>(g.top_k)}, ScalarType::Int);
  Tensor out_weights = empty({rows, weights_k}, ScalarType::Float);
  Tensor out_counts = empty({static_cast<int64_t>(g.ep_size)}, ScalarType::Int);
  Tensor out_stats = empty({stats_ranks, stats_experts}, ScalarType::Int);
  p.out_topk_ids = static_cast<int32_t*>(out_ids.mutable_data_ptr());
  if (weights_k > 0) p.out_topk_weights = static_cast<float*>(out_weights.mutable_data_ptr());
  p.out_recv_counts = static_cast<int32_t*>(out_counts.mutable_data_ptr());
  if (stats_ranks > 0) p.out_eplb_stats = static_cast<int32_t*>(out_stats.mutable_data_ptr());

  std::vector<RoundHeader> headers(static_cast<size_t>(g.ep_size));
  p.out_headers = headers.data();

  switch (cake::dispatch(p, torch_parallel_for())) {
    case cake::Outcome::kDone:
      break;
    case cake::Outcome::kTimeout:
      raise_timeout(control, p.workspace);
    case cake::Outcome::kInterrupted:
      raise_interrupt();
    case cake::Outcome::kDisagreement:
      raise_disagreement(p);
  }
  return {out_ids, out_weights, out_counts, out_stats};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CPU, m) { m.impl("cake_dispatch", TORCH_BOX(&cake_dispatch)); }

}  // namespace moe_ep::ops
