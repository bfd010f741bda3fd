// The ops moe_ep::cake_combine, cake_combine_out and cake_combine_quantized for CPU tensors.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <tuple>

#include "cake/cpu.h"
#include "cake/reduce_rows.h"
#include "ops/errors.h"
#include "ops/parallel.h"
#include "ops/workspace_args.h"

namespace moe_ep::ops {
namespace {

cake::RowType row_type_from(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return cake::RowType::kFloat32;
    case ScalarType::Half:
      return cake::RowType::kFloat16;
    case ScalarType::BFloat16:
      return cake::RowType::kBFloat16;
    default:
      fail("TypeError", "expert outputs must be float32, float16 or bfloat16");
  }
}

struct CombineArgs {
  cake::CombineParams params;
  ControlBlock& control;
};

CombineArgs combine_args(const Tensor& workspace, const std::optional<Tensor>& expert_output,
                         const std::optional<Tensor>& active_rank_mask,
                         const std::vector<int64_t>& geometry, int64_t ep_rank, int64_t num_tokens,
                         int64_t tokens_per_rank, int64_t hidden_size, ScalarType dtype,
                         int64_t timeout_sec) {
  cake::CombineParams p{};
  p.workspace = workspace_from(workspace, geometry_from(geometry), ep_rank);
  const Geometry& g = p.workspace.geometry;
  p.active = active_ranks_from(active_rank_mask, g, ep_rank);
  p.timeout_sec = checked_timeout(timeout_sec);
  p.tokens_per_rank = checked_tokens_per_rank(tokens_per_rank, g);
  p.row_type = row_type_from(dtype);
  p.hidden_size = hidden_size;
  const int64_t row_bytes = hidden_size * cake::row_type_bytes(p.row_type);
  check(hidden_size >= 1 && row_bytes <= g.combine_bytes_per_token, "an expert output row has ",
        row_bytes, " bytes, more than combine_bytes_per_token=", g.combine_bytes_per_token);
  ControlBlock& control = initialised_control(p.workspace);
  check_state(control.phase == Phase::kDispatch, "combine was called before dispatch");
  check(num_tokens == control.num_tokens && tokens_per_rank == control.tokens_per_rank,
        "combine must be called with the sizes of its dispatch, num_tokens=", control.num_tokens,
        " and tokens_per_rank=", control.tokens_per_rank, ", got ", num_tokens, " and ",
        tokens_per_rank);
  p.num_tokens = static_cast<int32_t>(num_tokens);
  check(p.active == control.active, "active_rank_mask must be the one that dispatch got");
  if (expert_output.has_value()) {
    const int64_t rows = g.ep_size * tokens_per_rank;
    check_dtype(expert_output->scalar_type() == dtype,
                "expert_output must have the output's dtype");
    check(expert_output->dim() == 2 && expert_output->size(0) == rows &&
              expert_output->size(1) == hidden_size &&
              (hidden_size == 1 || expert_output->stride(1) == 1),
          "expert_output must be [", rows, ", ", hidden_size, "], its rows dense");
    if (!is_combine_input(*expert_output, p.workspace)) {
      p.expert_output = static_cast<const uint8_t*>(expert_output->const_data_ptr());
      p.expert_output_stride =
          expert_output->stride(0) * static_cast<int64_t>(expert_output->element_size());
    }
  }
  return {p, control};
}

void run(CombineArgs& args) {
  const cake::CombineParams& p = args.params;
  switch (cake::combine(p, torch_parallel_for())) {
    case cake::Outcome::kDone:
      break;
    case cake::Outcome::kTimeout:
      raise_timeout(args.control, p.workspace);
    case cake::Outcome::kInterrupted:
      raise_interrupt();
    case cake::Outcome::kDisagreement:
      fail("MoEEpConfigError",
           "the ranks called combine with expert outputs of different width or "
           "dtype; this rank's have ",
           p.hidden_size, " elements of ", cake::row_type_bytes(p.row_type),
           " bytes. No sums were formed, the round is over");
  }
  // Only now, when the round is closed on all ranks: raising earlier would leave the peers waiting.
  raise_invalid_ids(args.control, p.workspace);
}

Tensor cake_combine(Tensor workspace, std::optional<Tensor> expert_output,
                    std::optional<Tensor> active_rank_mask, std::vector<int64_t> geometry,
                    int64_t ep_rank, int64_t num_tokens, int64_t tokens_per_rank,
                    int64_t hidden_size, ScalarType dtype, int64_t timeout_sec) {
  CombineArgs args = combine_args(workspace, expert_output, active_rank_mask, geometry, ep_rank,
                                  num_tokens, tokens_per_rank, hidden_size, dtype, timeout_sec);
  Tensor output = torch::stable::empty({num_tokens, hidden_size}, dtype);
  args.params.output = static_cast<uint8_t*>(output.mutable_data_ptr());
  run(args);
  return output;
}

void cake_combine_out(Tensor workspace, std::optional<Tensor> expert_output,
                      std::optional<Tensor> active_rank_mask, std::vector<int64_t> geometry,
                      int64_t ep_rank, int64_t tokens_per_rank, int64_t timeout_sec,
                      Tensor output) {
  check(output.dim() == 2 && output.is_contiguous(),
        "output must be contiguous [num_tokens, hidden_size]");
  CombineArgs args =
      combine_args(workspace, expert_output, active_rank_mask, geometry, ep_rank, output.size(0),
                   tokens_per_rank, output.size(1), output.scalar_type(), timeout_sec);
  check_outside_workspace("output", output, args.params.workspace);
  args.params.output = static_cast<uint8_t*>(output.mutable_data_ptr());
  run(args);
}

// format, scale_layout: the values of QuantFormat and ScaleLayout in core.
std::tuple<Tensor, Tensor> cake_combine_quantized(
    Tensor workspace, std::optional<Tensor> expert_output, std::optional<Tensor> active_rank_mask,
    std::vector<int64_t> geometry, int64_t ep_rank, int64_t num_tokens, int64_t tokens_per_rank,
    int64_t hidden_size, ScalarType dtype, int64_t timeout_sec, int64_t format,
    int64_t scale_layout, double scalar_scale) {
  check(format >= 0 && format <= static_cast<int64_t>(QuantFormat::kNvfp4), "unknown format ",
        format);
  check(scale_layout >= 0 && scale_layout <= static_cast<int64_t>(ScaleLayout::kSwizzle8x4),
        "unknown scale_layout ", scale_layout);
  const auto scale = static_cast<float>(scalar_scale);
  check(std::isfinite(scale) && scale > 0, "scalar_scale must be finite and positive, got ",
        scalar_scale);
  CombineArgs args = combine_args(workspace, expert_output, active_rank_mask, geometry, ep_rank,
                                  num_tokens, tokens_per_rank, hidden_size, dtype, timeout_sec);
  QuantizedRows out{static_cast<QuantFormat>(format),
                    static_cast<ScaleLayout>(scale_layout),
                    scale,
                    num_tokens,
                    hidden_size,
                    nullptr,
                    nullptr};
  const int64_t blocks = scales_per_row(out.format, hidden_size);
  Tensor values = torch::stable::empty({num_tokens, quantized_row_bytes(out.format, hidden_size)},
                                       ScalarType::Byte);
  Tensor scales = torch::stable::empty(
      {padded_scale_rows(out.layout, num_tokens), padded_scale_blocks(out.layout, blocks)},
      ScalarType::Byte);
  out.values = static_cast<uint8_t*>(values.mutable_data_ptr());
  out.scales = static_cast<uint8_t*>(scales.mutable_data_ptr());
  args.params.quantized = &out;
  run(args);
  return {values, scales};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CPU, m) {
  m.impl("cake_combine", TORCH_BOX(&cake_combine));
  m.impl("cake_combine_out", TORCH_BOX(&cake_combine_out));
  m.impl("cake_combine_quantized", TORCH_BOX(&cake_combine_quantized));
}

}  // namespace moe_ep::ops
