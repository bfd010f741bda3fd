// From op arguments to the plain structs of the two-sided transport, with the checks that keep
// memory safe: what CPU and CUDA share.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "ops/workspace_args.h"
#include "two_sided/params.h"

namespace moe_ep::ops {

// Checks type and shape; not yet whether it was initialised.
two_sided::WorkspaceView two_sided_workspace(const Tensor& workspace,
                                             const std::vector<int64_t>& geometry, int64_t ep_rank);

// Where a workspace lies.
WorkspaceRows rows_of(const two_sided::WorkspaceView& workspace);

void check_outside_workspace(const char* name, const Tensor& tensor,
                             const two_sided::WorkspaceView& workspace);

// The arguments of two_sided_prepare, in the order of the op.
struct PrepareInputs {
  const Tensor& workspace;
  const Tensor& topk_ids;
  const std::vector<int64_t>& geometry;
  int64_t ep_rank;
  int64_t invalid_expert_id;
  int64_t tokens_per_rank;
  const std::vector<int64_t>& row_bytes;
  bool has_weights;
  int64_t timeout_sec;
};
// Everything but the outputs. Raises where an argument is wrong; looks at no memory.
two_sided::PrepareParams prepare_args(const PrepareInputs& inputs);

// New tensors: ids as sent, send_tokens, send_counts, recv_counts.
using PrepareOutputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;
PrepareOutputs fresh_outputs(two_sided::PrepareParams& params, const Tensor& workspace);

// The fields that move, for `num_tokens` and `tokens_per_rank` of params.
void set_fields(two_sided::AlltoallvParams& params, const std::vector<Tensor>& rows,
                std::vector<Tensor>& received, const Tensor& workspace);

// [ep_size] int32, dense.
int32_t* recv_counts_from(Tensor& recv_counts, const Tensor& workspace,
                          const two_sided::WorkspaceView& view);

// Contiguous int32, 1-D, where the workspace is.
const int32_t* send_tokens_of(const Tensor& send_tokens, const Tensor& workspace,
                              const two_sided::WorkspaceView& view);

// The experts' rows of a combine, for `tokens_per_rank` of params.
void set_expert_output(two_sided::CombineParams& params, const Tensor& expert_output,
                       const Tensor& workspace, int64_t hidden_size);

// [num_tokens, hidden_size] of the experts' dtype.
Tensor new_sums(int64_t num_tokens, const Tensor& expert_output);

// What combine_out may take as its output.
void check_output(const Tensor& output, const Tensor& expert_output, const Tensor& workspace,
                  const two_sided::WorkspaceView& view);

// Whether a sum may be written where a row of an expert still waits.
bool shares_memory(const Tensor& output, const Tensor& expert_output);

// 0: no limit.
int32_t checked_max_sm_count(int64_t max_sm_count);

}  // namespace moe_ep::ops
