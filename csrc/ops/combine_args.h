// What combine gets and gives, on every device.
#pragma once

#include <optional>
#include <vector>

#include "core/quant_formats.h"
#include "ops/workspace_args.h"

namespace moe_ep::ops {

// The arguments that all combine ops share, in the order of their schemas.
struct CombineInputs {
  const Tensor& workspace;
  const std::optional<Tensor>& expert_output;
  const std::optional<Tensor>& active_rank_mask;
  const std::vector<int64_t>& geometry;
  int64_t ep_rank;
  int64_t num_tokens;
  int64_t tokens_per_rank;
  int64_t hidden_size;
  ScalarType dtype;
  int64_t timeout_sec;
  bool low_precision;
  bool reader_can_quantize = false;  // the op has kernels for that: see one_sided/fp8_rows.h
};

// Everything but the output. Raises where an argument is wrong; looks at no memory of the
// workspace. The mask is in params.active where it is in host memory.
one_sided::CombineParams combine_args(const CombineInputs& inputs);

// A new tensor for the sums.
Tensor fresh_sums(one_sided::CombineParams& params, const CombineInputs& inputs);
// Raises unless `output` can take the sums where it is.
void set_sums(one_sided::CombineParams& params, const Tensor& output, const Tensor& workspace);

struct QuantizedSums {
  Tensor values;
  Tensor scales;
  QuantizedRows rows;  // what params.quantized must point to
};
// format, scale_layout: the values of QuantFormat and ScaleLayout in core.
QuantizedSums fresh_quantized_sums(const CombineInputs& inputs, int64_t format,
                                   int64_t scale_layout, double scalar_scale);

}  // namespace moe_ep::ops
