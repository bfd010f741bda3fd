#include "ops/combine_args.h"

#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "one_sided/fp8_rows.h"
#include "ops/errors.h"
#include "ops/tensor_args.h"

namespace moe_ep::ops {
namespace {

void check_not_in_place(const one_sided::CombineParams& p) {
  check(!one_sided::travels_as_fp8(p),
        "expert_output must be a tensor of your own in a low-precision combine, and not the "
        "combine input buffer: rows are quantised on their way there");
}

void set_expert_output(one_sided::CombineParams& p, const CombineInputs& in) {
  if (!in.expert_output.has_value()) {
    check_not_in_place(p);
    return;
  }
  const int64_t num_rows = p.workspace.geometry.ep_size * in.tokens_per_rank;
  const RowsIn rows =
      expert_output_from(*in.expert_output, in.workspace, in.dtype, num_rows, in.hidden_size);
  if (is_combine_input(*in.expert_output, p.workspace)) {
    check_not_in_place(p);
    return;
  }
  p.expert_output = rows.data;
  p.expert_output_stride = rows.stride;
}

}  // namespace

one_sided::CombineParams combine_args(const CombineInputs& in) {
  one_sided::CombineParams p{};
  p.workspace = workspace_from(in.workspace, geometry_from(in.geometry), in.ep_rank);
  const Geometry& g = p.workspace.geometry;
  p.active = active_ranks_from(in.active_rank_mask, in.workspace, g, in.ep_rank).fixed;
  p.timeout_sec = checked_timeout(in.timeout_sec);
  p.tokens_per_rank = checked_tokens_per_rank(in.tokens_per_rank, g);
  p.row_type = row_type_from(in.dtype);
  p.hidden_size = in.hidden_size;
  p.low_precision = in.low_precision;
  p.reader_quantizes = in.low_precision && in.reader_can_quantize &&
                       one_sided::reader_quantizes(g, p.hidden_size, p.row_type);
  // Divided, not multiplied: a product might not fit 64 bits.
  const int64_t element = in.low_precision ? 1 : row_type_bytes(p.row_type);
  check(in.hidden_size >= 1 && in.hidden_size <= g.combine_bytes_per_token / element &&
            one_sided::travelling_row_bytes(p) <= g.combine_bytes_per_token,
        "an expert output row has ", in.hidden_size, " elements of ", element,
        in.low_precision ? " byte and a scale of 4 bytes for every 128" : " bytes",
        ", more than combine_bytes_per_token=", g.combine_bytes_per_token);
  check(in.num_tokens >= 0 && in.num_tokens <= in.tokens_per_rank, "num_tokens must be in [0, ",
        in.tokens_per_rank, "], got ", in.num_tokens);
  p.num_tokens = static_cast<int32_t>(in.num_tokens);
  set_expert_output(p, in);
  return p;
}

Tensor fresh_sums(one_sided::CombineParams& p, const CombineInputs& in) {
  Tensor output = torch::stable::empty({in.num_tokens, in.hidden_size}, in.dtype, std::nullopt,
                                       in.workspace.device());
  p.output = static_cast<uint8_t*>(output.mutable_data_ptr());
  return output;
}

void set_sums(one_sided::CombineParams& p, const Tensor& output, const Tensor& workspace) {
  check_device("output", output, workspace);
  check_outside_workspace("output", output, p.workspace);
  p.output = static_cast<uint8_t*>(output.mutable_data_ptr());
}

QuantizedSums fresh_quantized_sums(const CombineInputs& in, int64_t format, int64_t scale_layout,
                                   double scalar_scale) {
  check(format >= 0 && format <= static_cast<int64_t>(QuantFormat::kNvfp4), "unknown format ",
        format);
  check(scale_layout >= 0 && scale_layout <= static_cast<int64_t>(ScaleLayout::kSwizzle8x4),
        "unknown scale_layout ", scale_layout);
  const auto scale = static_cast<float>(scalar_scale);
  check(std::isfinite(scale) && scale > 0, "scalar_scale must be finite and positive, got ",
        scalar_scale);
  QuantizedRows rows{static_cast<QuantFormat>(format),
                     static_cast<ScaleLayout>(scale_layout),
                     scale,
                     in.num_tokens,
                     in.hidden_size,
                     nullptr,
                     nullptr};
  const auto empty = [&](int64_t height, int64_t width) {
    return torch::stable::empty({height, width}, ScalarType::Byte, std::nullopt,
                                in.workspace.device());
  };
  Tensor values = empty(in.num_tokens, quantized_row_bytes(rows.format, in.hidden_size));
  Tensor scales =
      empty(padded_scale_rows(rows.layout, in.num_tokens),
            padded_scale_blocks(rows.layout, scales_per_row(rows.format, in.hidden_size)));
  rows.values = static_cast<uint8_t*>(values.mutable_data_ptr());
  rows.scales = static_cast<uint8_t*>(scales.mutable_data_ptr());
  return {values, scales, rows};
}

}  // namespace moe_ep::ops
