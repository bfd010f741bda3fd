#include "ops/dispatch_args.h"

#include <torch/csrc/stable/ops.h>

#include "ops/errors.h"
#include "ops/tensor_args.h"

namespace moe_ep::ops {
namespace {

void set_routing(one_sided::DispatchParams& p, const DispatchInputs& in) {
  const Geometry& g = p.workspace.geometry;
  const TopkIds ids = topk_ids_from(in.topk_ids, in.workspace, g.top_k, p.tokens_per_rank);
  check_outside_workspace("topk_ids", in.topk_ids, p.workspace);
  p.ids_are_int64 = ids.are_int64;
  p.num_tokens = ids.num_tokens;
  p.topk_ids = ids.data;
  if (!in.topk_weights.has_value()) return;
  const Tensor& weights = *in.topk_weights;
  check_device("topk_weights", weights, in.workspace);
  check_outside_workspace("topk_weights", weights, p.workspace);
  check_dtype(weights.scalar_type() == ScalarType::Float, "topk_weights must be float32");
  check(weights.is_contiguous() && weights.dim() == 2 && weights.size(0) == p.num_tokens &&
            weights.size(1) == g.top_k,
        "topk_weights must be contiguous, of the shape of topk_ids");
  p.has_weights = true;
  p.topk_weights = static_cast<const float*>(weights.const_data_ptr());
}

void set_payloads(one_sided::DispatchParams& p, const DispatchInputs& in) {
  check(!in.payloads.empty() && in.payloads.size() <= kMaxPayloads, "payloads must be 1 to ",
        kMaxPayloads, " tensors, got ", in.payloads.size());
  int64_t bytes = 0;
  for (const Tensor& payload : in.payloads) {
    p.payloads[p.num_payloads] = payload_from(payload, in.workspace, p.num_tokens);
    check_outside_workspace("a payload", payload, p.workspace);
    bytes += p.payloads[p.num_payloads++].row_bytes;
  }
  check(bytes <= p.workspace.geometry.dispatch_bytes_per_token, "the payload rows of a token have ",
        bytes, " bytes, more than dispatch_bytes_per_token=",
        p.workspace.geometry.dispatch_bytes_per_token);
}

void set_stats(one_sided::DispatchParams& p, const DispatchInputs& in) {
  if (!in.eplb_local_stats.has_value()) return;
  const Tensor& stats = *in.eplb_local_stats;
  const int32_t wanted = p.workspace.geometry.eplb_stats_num_experts;
  check(wanted > 0, "eplb_local_stats needs a communication with eplb_stats_num_experts > 0");
  check_device("eplb_local_stats", stats, in.workspace);
  check_outside_workspace("eplb_local_stats", stats, p.workspace);
  check_dtype(stats.scalar_type() == ScalarType::Int, "eplb_local_stats must be int32");
  check(stats.is_contiguous() && stats.numel() == wanted, "eplb_local_stats must be contiguous [",
        wanted, "]");
  p.eplb_local_stats = static_cast<const int32_t*>(stats.const_data_ptr());
}

}  // namespace

DispatchArgs dispatch_args(const DispatchInputs& in) {
  one_sided::DispatchParams p{};
  p.workspace = workspace_from(in.workspace, geometry_from(in.geometry), in.ep_rank);
  const Geometry& g = p.workspace.geometry;
  const ActiveRanks active = active_ranks_from(in.active_rank_mask, in.workspace, g, in.ep_rank);
  p.active = active.fixed;
  p.tokens_per_rank = checked_tokens_per_rank(in.tokens_per_rank, g);
  p.timeout_sec = checked_timeout(in.timeout_sec);
  p.invalid_expert_id = invalid_expert_id_from(in.invalid_expert_id, g.num_experts);
  set_routing(p, in);
  set_payloads(p, in);
  set_stats(p, in);
  return {p, active.on_device};
}

DispatchOutputs fresh_outputs(one_sided::DispatchParams& p, const Tensor& workspace) {
  const Geometry& g = p.workspace.geometry;
  const auto empty = [&](int64_t rows, int64_t columns, ScalarType dtype) {
    return torch::stable::empty({rows, columns}, dtype, std::nullopt, workspace.device());
  };
  const bool has_stats = p.eplb_local_stats != nullptr;
  const int64_t rows = static_cast<int64_t>(g.ep_size) * p.tokens_per_rank;
  Tensor ids = empty(rows, g.top_k, ScalarType::Int);
  Tensor weights = empty(rows, p.has_weights ? g.top_k : 0, ScalarType::Float);
  Tensor counts = torch::stable::empty({static_cast<int64_t>(g.ep_size)}, ScalarType::Int,
                                       std::nullopt, workspace.device());
  Tensor stats =
      empty(has_stats ? g.ep_size : 0, has_stats ? g.eplb_stats_num_experts : 0, ScalarType::Int);
  p.out_topk_ids = static_cast<int32_t*>(ids.mutable_data_ptr());
  if (p.has_weights) p.out_topk_weights = static_cast<float*>(weights.mutable_data_ptr());
  p.out_recv_counts = static_cast<int32_t*>(counts.mutable_data_ptr());
  if (has_stats) p.out_eplb_stats = static_cast<int32_t*>(stats.mutable_data_ptr());
  return {ids, weights, counts, stats};
}

void leave_in_workspace(one_sided::DispatchParams& p) {
  const WorkspaceLayout layout = WorkspaceLayout::of(p.workspace.geometry);
  const one_sided::Segment own(p.workspace, layout, p.workspace.ep_rank);
  p.out_topk_ids = own.topk_ids();
  if (p.has_weights) p.out_topk_weights = own.topk_weights();
  p.out_recv_counts = own.recv_counts();
  if (p.eplb_local_stats != nullptr) p.out_eplb_stats = own.eplb_stats();
}

}  // namespace moe_ep::ops
