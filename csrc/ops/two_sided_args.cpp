#include "ops/two_sided_args.h"

#include <torch/csrc/stable/ops.h>

#include <limits>
#include <stdexcept>

#include "ops/errors.h"
#include "ops/tensor_args.h"
#include "two_sided/layout.h"

namespace moe_ep::ops {
namespace {

two_sided::Geometry geometry_of_fifos(const std::vector<int64_t>& f) {
  check(f.size() == 8, "geometry must have 8 fields, got ", f.size());
  try {
    return two_sided::valid_geometry(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]);
  } catch (const std::invalid_argument& error) {
    fail("MoEEpConfigError", error.what());
  }
}

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

}  // namespace

WorkspaceRows rows_of(const two_sided::WorkspaceView& view) {
  return {view.base, view.rank_stride, view.ep_rank, view.geometry.ep_size,
          static_cast<int64_t>(two_sided::FifoLayout::of(view.geometry).segment_bytes)};
}

two_sided::WorkspaceView two_sided_workspace(const Tensor& workspace,
                                             const std::vector<int64_t>& geometry,
                                             int64_t ep_rank) {
  const two_sided::Geometry g = geometry_of_fifos(geometry);
  const auto segment_bytes = static_cast<int64_t>(two_sided::FifoLayout::of(g).segment_bytes);
  const WorkspaceRows rows = workspace_rows(workspace, g.ep_size, segment_bytes, ep_rank);
  return {rows.base, rows.rank_stride, rows.ep_rank, g, current_interrupt_check()};
}

void check_outside_workspace(const char* name, const Tensor& tensor,
                             const two_sided::WorkspaceView& workspace) {
  check_outside_workspace(name, tensor, rows_of(workspace));
}

two_sided::PrepareParams prepare_args(const PrepareInputs& in) {
  two_sided::PrepareParams p{};
  p.workspace = two_sided_workspace(in.workspace, in.geometry, in.ep_rank);
  const two_sided::Geometry& g = p.workspace.geometry;
  p.tokens_per_rank = bounded("tokens_per_rank", in.tokens_per_rank, 0, g.max_tokens_per_rank);
  p.timeout_sec = checked_timeout(in.timeout_sec);
  p.invalid_expert_id = invalid_expert_id_from(in.invalid_expert_id, g.num_experts);
  p.fields = widths_from(in.row_bytes);
  p.has_weights = in.has_weights;
  const TopkIds ids = topk_ids_from(in.topk_ids, in.workspace, g.top_k, p.tokens_per_rank);
  check_outside_workspace("topk_ids", in.topk_ids, p.workspace);
  p.num_tokens = ids.num_tokens;
  p.topk_ids = ids.data;
  p.ids_are_int64 = ids.are_int64;
  return p;
}

PrepareOutputs fresh_outputs(two_sided::PrepareParams& p, const Tensor& workspace) {
  const two_sided::Geometry& g = p.workspace.geometry;
  const auto words = [&](std::initializer_list<int64_t> shape, int32_t*& data) {
    Tensor tensor = torch::stable::empty(shape, ScalarType::Int, std::nullopt, workspace.device());
    data = static_cast<int32_t*>(tensor.mutable_data_ptr());
    return tensor;
  };
  const int64_t places = static_cast<int64_t>(p.num_tokens) * g.max_destinations();
  Tensor ids = words({p.num_tokens, g.top_k}, p.out_topk_ids);
  Tensor send_tokens = words({places}, p.out_send_tokens);
  Tensor send_counts = words({g.ep_size}, p.out_send_counts);
  Tensor recv_counts = words({g.ep_size}, p.out_recv_counts);
  return {ids, send_tokens, send_counts, recv_counts};
}

void set_fields(two_sided::AlltoallvParams& p, const std::vector<Tensor>& rows,
                std::vector<Tensor>& received, const Tensor& workspace) {
  p.num_fields = static_cast<int32_t>(rows.size());
  const int64_t num_rows = static_cast<int64_t>(p.workspace.geometry.ep_size) * p.tokens_per_rank;
  for (int32_t i = 0; i < p.num_fields; ++i) {
    const auto index = static_cast<size_t>(i);
    p.rows[i] = payload_from(rows[index], workspace, p.num_tokens);
    check_outside_workspace("a payload", rows[index], p.workspace);
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

int32_t* recv_counts_from(Tensor& recv_counts, const Tensor& workspace,
                          const two_sided::WorkspaceView& view) {
  check_device("recv_counts", recv_counts, workspace);
  check_outside_workspace("recv_counts", recv_counts, view);
  check_dtype(recv_counts.scalar_type() == ScalarType::Int, "recv_counts must be int32");
  check(recv_counts.dim() == 1 && recv_counts.size(0) == view.geometry.ep_size &&
            recv_counts.is_contiguous(),
        "recv_counts must be contiguous [ep_size=", view.geometry.ep_size, "]");
  return static_cast<int32_t*>(recv_counts.mutable_data_ptr());
}

const int32_t* send_tokens_of(const Tensor& send_tokens, const Tensor& workspace,
                              const two_sided::WorkspaceView& view) {
  check_device("send_tokens", send_tokens, workspace);
  check_outside_workspace("send_tokens", send_tokens, view);
  check_dtype(send_tokens.scalar_type() == ScalarType::Int, "send_tokens must be int32");
  check(send_tokens.dim() == 1 && send_tokens.is_contiguous(),
        "send_tokens must be contiguous and 1-D");
  return static_cast<const int32_t*>(send_tokens.const_data_ptr());
}

void set_expert_output(two_sided::CombineParams& p, const Tensor& expert_output,
                       const Tensor& workspace, int64_t hidden_size) {
  p.row_type = row_type_from(expert_output.scalar_type());
  check(hidden_size >= 1 && hidden_size <= kMaxSegmentBytes, "hidden_size must be in [1, ",
        kMaxSegmentBytes, "], got ", hidden_size);
  p.hidden_size = hidden_size;
  const int64_t num_rows = static_cast<int64_t>(p.workspace.geometry.ep_size) * p.tokens_per_rank;
  p.expert_output = expert_output_from(expert_output, workspace, expert_output.scalar_type(),
                                       num_rows, hidden_size);
  check_outside_workspace("expert_output", expert_output, p.workspace);
}

Tensor new_sums(int64_t num_tokens, const Tensor& expert_output) {
  return torch::stable::empty({num_tokens, expert_output.size(1)}, expert_output.scalar_type(),
                              std::nullopt, expert_output.device());
}

void check_output(const Tensor& output, const Tensor& expert_output, const Tensor& workspace,
                  const two_sided::WorkspaceView& view) {
  check_sums(output);
  check_device("output", output, workspace);
  check_dtype(output.scalar_type() == expert_output.scalar_type(),
              "expert_output must have the output's dtype");
  check_outside_workspace("output", output, view);
}

bool shares_memory(const Tensor& output, const Tensor& expert_output) {
  const auto* begin = static_cast<const uint8_t*>(output.const_data_ptr());
  return overlaps(expert_output, begin,
                  begin + output.numel() * static_cast<int64_t>(output.element_size()));
}

int32_t checked_max_sm_count(int64_t max_sm_count) {
  return bounded("max_sm_count", max_sm_count, 0, std::numeric_limits<int32_t>::max());
}

}  // namespace moe_ep::ops
