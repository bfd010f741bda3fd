#include "ops/tensor_args.h"

#include "ops/errors.h"

namespace moe_ep::ops {

TopkIds topk_ids_from(const Tensor& ids, const Tensor& workspace, int64_t top_k,
                      int64_t tokens_per_rank) {
  check_device("topk_ids", ids, workspace);
  const bool are_int64 = ids.scalar_type() == ScalarType::Long;
  check_dtype(are_int64 || ids.scalar_type() == ScalarType::Int, "topk_ids must be int32 or int64");
  check(ids.dim() == 2 && ids.size(1) == top_k && ids.is_contiguous(),
        "topk_ids must be contiguous [num_tokens, top_k=", top_k, "]");
  check(ids.size(0) <= tokens_per_rank, "topk_ids has ", ids.size(0),
        " rows, more than tokens_per_rank=", tokens_per_rank);
  return {ids.const_data_ptr(), are_int64, static_cast<int32_t>(ids.size(0))};
}

bool has_dense_rows(const Tensor& tensor) {
  return tensor.dim() == 2 && (tensor.size(1) <= 1 || tensor.stride(1) == 1);
}

RowsIn rows_in(const Tensor& tensor) {
  const auto element = static_cast<int64_t>(tensor.element_size());
  return {static_cast<const uint8_t*>(tensor.const_data_ptr()), tensor.size(1) * element,
          tensor.stride(0) * element};
}

RowsIn payload_from(const Tensor& payload, const Tensor& workspace, int64_t num_tokens) {
  check_device("a payload", payload, workspace);
  check(payload.dim() == 2 && payload.size(0) == num_tokens,
        "each payload must be 2-D with a row for each of the ", num_tokens, " tokens");
  check(has_dense_rows(payload), "the rows of a payload must be dense");
  return rows_in(payload);
}

int32_t invalid_expert_id_from(int64_t invalid_expert_id, int64_t num_experts) {
  const int32_t id = checked_invalid_expert_id(invalid_expert_id);
  check(id < 0 || id >= num_experts, "invalid_expert_id must be an int32 outside [0, ", num_experts,
        "), got ", invalid_expert_id);
  return id;
}

RowType row_type_from(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return RowType::kFloat32;
    case ScalarType::Half:
      return RowType::kFloat16;
    case ScalarType::BFloat16:
      return RowType::kBFloat16;
    default:
      fail("TypeError", "expert outputs must be float32, float16 or bfloat16");
  }
}

RowsIn expert_output_from(const Tensor& given, const Tensor& workspace, ScalarType dtype,
                          int64_t num_rows, int64_t hidden_size) {
  check_device("expert_output", given, workspace);
  check_dtype(given.scalar_type() == dtype, "expert_output must have the output's dtype");
  check(has_dense_rows(given) && given.size(0) == num_rows && given.size(1) == hidden_size,
        "expert_output must be [", num_rows, ", ", hidden_size, "], its rows dense");
  return rows_in(given);
}

void check_sums(const Tensor& output) {
  check(output.dim() == 2 && output.is_contiguous(),
        "output must be contiguous [num_tokens, hidden_size]");
}

}  // namespace moe_ep::ops
