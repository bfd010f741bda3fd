// The ops moe_ep::two_sided_prepare and two_sided_alltoallv for CPU tensors.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "ops/errors.h"
#include "ops/round_errors.h"
#include "ops/tensor_args.h"
#include "ops/two_sided_args.h"
#include "two_sided/cpu.h"

namespace moe_ep::ops {
namespace {

two_sided::FieldWidths widths_from(const std::vector<int64_t>& row_bytes) {
  check(!row_bytes.empty() && row_bytes.size() <= kMaxPayloads, "row_bytes must have 1 to ",
        kMaxPayloads, " fields, got ", row_bytes.size());
  two_sided::FieldWidths fields{};
  int64_t left = kMaxSegmentBytes;
  for (const int64_t bytes : row_bytes) {
    check(bytes >= 0 && bytes <= left, "row_bytes must be 0 to ", kMaxSegmentBytes,
          " together, got ", bytes);
    left -= bytes;
    fields.row_bytes[fields.num_fields++] = bytes;
  }
  check(left < kMaxSegmentBytes, "row_bytes must be of at least one byte together");
  return fields;
}

int32_t tokens_per_rank_from(int64_t tokens_per_rank, const two_sided::Geometry& g) {
  return bounded("tokens_per_rank", tokens_per_rank, 0, g.max_tokens_per_rank);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> two_sided_prepare(
    Tensor workspace, Tensor topk_ids, std::vector<int64_t> geometry, int64_t ep_rank,
    int64_t invalid_expert_id, int64_t tokens_per_rank, std::vector<int64_t> row_bytes,
    bool has_weights, int64_t timeout_sec) {
  two_sided::PrepareParams p{};
  p.workspace = two_sided_workspace(workspace, geometry, ep_rank);
  const two_sided::Geometry& g = p.workspace.geometry;
  p.tokens_per_rank = tokens_per_rank_from(tokens_per_rank, g);
  p.timeout_sec = checked_timeout(timeout_sec);
  p.invalid_expert_id = invalid_expert_id_from(invalid_expert_id, g.num_experts);
  p.fields = widths_from(row_bytes);
  p.has_weights = has_weights;
  const TopkIds ids = topk_ids_from(topk_ids, workspace, g.top_k, p.tokens_per_rank);
  check_outside_workspace("topk_ids", topk_ids, p.workspace);
  p.num_tokens = ids.num_tokens;
  p.topk_ids = ids.data;
  p.ids_are_int64 = ids.are_int64;
  const ControlBlock& control = initialised_control(p.workspace);
  check_state(control.phase == Phase::kIdle, "prepare was called twice without combine between");

  const auto words = [](std::initializer_list<int64_t> shape) {
    return torch::stable::empty(shape, ScalarType::Int);
  };
  const auto data = [](Tensor& tensor) { return static_cast<int32_t*>(tensor.mutable_data_ptr()); };
  Tensor sent_ids = words({p.num_tokens, g.top_k});
  Tensor send_tokens = words({static_cast<int64_t>(p.num_tokens) * g.max_destinations()});
  Tensor send_counts = words({g.ep_size});
  Tensor recv_counts = words({g.ep_size});
  std::vector<RoundHeader> headers(static_cast<size_t>(g.ep_size));
  p.out_topk_ids = data(sent_ids);
  p.out_send_tokens = data(send_tokens);
  p.out_send_counts = data(send_counts);
  p.out_recv_counts = data(recv_counts);
  p.out_headers = headers.data();
  const Outcome outcome = two_sided::prepare(p);
  raise_unless_met(outcome, p.workspace);
  if (outcome == Outcome::kDisagreement) raise_dispatch_disagreement(headers.data(), g.ep_size);
  return {sent_ids, send_tokens, send_counts, recv_counts};
}

// The fields of this call must be those that prepare announced: the peers count on it.
void set_fields(two_sided::AlltoallvParams& p, const ControlBlock& control,
                const std::vector<Tensor>& rows, std::vector<Tensor>& received,
                const Tensor& workspace) {
  const two_sided::FifoLayout layout = two_sided::FifoLayout::of(p.workspace.geometry);
  const RoundHeader& announced = two_sided::Segment(p.workspace, layout, p.workspace.ep_rank)
                                     .round_header(p.workspace.ep_rank);
  p.num_fields = announced.num_payloads;
  check(static_cast<int64_t>(rows.size()) == p.num_fields && received.size() == rows.size(),
        "rows and received must have a tensor for each of the ", p.num_fields,
        " fields of prepare, got ", rows.size(), " and ", received.size());
  const int64_t num_rows =
      static_cast<int64_t>(p.workspace.geometry.ep_size) * control.tokens_per_rank;
  for (int32_t i = 0; i < p.num_fields; ++i) {
    const auto index = static_cast<size_t>(i);
    p.rows[i] = payload_from(rows[index], workspace, control.num_tokens);
    check_outside_workspace("a payload", rows[index], p.workspace);
    check(p.rows[i].row_bytes == announced.row_bytes[i], "field ", i, " must have rows of ",
          announced.row_bytes[i], " bytes as prepare said, got ", p.rows[i].row_bytes);
    Tensor& to = received[index];
    check_device("received", to, workspace);
    check_outside_workspace("received", to, p.workspace);
    check(to.dim() == 2 && to.size(0) == num_rows && to.is_contiguous() &&
              to.size(1) * static_cast<int64_t>(to.element_size()) == p.rows[i].row_bytes,
          "received[", i, "] must be contiguous [", num_rows, ", columns] with rows of ",
          p.rows[i].row_bytes, " bytes");
    p.received[i] = static_cast<uint8_t*>(to.mutable_data_ptr());
  }
}

void two_sided_alltoallv(Tensor workspace, std::vector<Tensor> rows, Tensor send_tokens,
                         std::vector<int64_t> geometry, int64_t ep_rank, int64_t timeout_sec,
                         std::vector<Tensor> received) {
  two_sided::AlltoallvParams p{};
  p.workspace = two_sided_workspace(workspace, geometry, ep_rank);
  p.timeout_sec = checked_timeout(timeout_sec);
  const ControlBlock& control = initialised_control(p.workspace);
  check_state(control.phase == Phase::kDispatch && round_state_of(p.workspace).rows_delivered == 0,
              "alltoallv must follow prepare, once");
  p.tokens_per_rank = control.tokens_per_rank;
  p.send_tokens = send_tokens_from(send_tokens, p.workspace);
  set_fields(p, control, rows, received, workspace);
  raise_unless_met(two_sided::alltoallv(p), p.workspace);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CPU, m) {
  m.impl("two_sided_prepare", TORCH_BOX(&two_sided_prepare));
  m.impl("two_sided_alltoallv", TORCH_BOX(&two_sided_alltoallv));
}

}  // namespace moe_ep::ops
