// Checks of the tensors that a dispatch or combine takes, for every transport.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "core/rows.h"
#include "ops/workspace_args.h"

namespace moe_ep::ops {

struct TopkIds {
  const void* data;  // [num_tokens, top_k], dense
  bool are_int64;    // else int32
  int32_t num_tokens;
};
TopkIds topk_ids_from(const Tensor& topk_ids, const Tensor& workspace, int64_t top_k,
                      int64_t tokens_per_rank);

// Whether it is 2-D, and each row dense; and if so, its rows.
bool has_dense_rows(const Tensor& tensor);
RowsIn rows_in(const Tensor& tensor);

// A payload of dispatch: 2-D with a row for each token, rows dense.
RowsIn payload_from(const Tensor& payload, const Tensor& workspace, int64_t num_tokens);

// invalid_expert_id must not be an expert's.
int32_t invalid_expert_id_from(int64_t invalid_expert_id, int64_t num_experts);

RowType row_type_from(ScalarType dtype);

// The experts' output [num_rows, hidden_size] of this dtype, rows dense.
RowsIn expert_output_from(const Tensor& expert_output, const Tensor& workspace, ScalarType dtype,
                          int64_t num_rows, int64_t hidden_size);

// Raises unless `output` has the form of [num_tokens, hidden_size] sums.
void check_sums(const Tensor& output);

}  // namespace moe_ep::ops
