// The ops moe_ep::cake_combine, cake_combine_out and cake_combine_quantized for CUDA tensors.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "cake/cuda.h"
#include "ops/combine_args.h"
#include "ops/device_rounds.h"
#include "ops/device_workspaces.h"
#include "ops/errors.h"
#include "ops/tensor_args.h"

namespace moe_ep::ops {
namespace {

void run(const cake::CombineParams& p, const CudaCall& call, DeviceWorkspaceState& state,
         bool enable_pdl) {
  close_round(p.workspace, call, state, [&] {
    return cake::launch_combine(p, {call.stream(), state.page, nullptr, enable_pdl});
  });
}

Tensor cake_combine(Tensor workspace, std::optional<Tensor> expert_output,
                    std::optional<Tensor> active_rank_mask, std::vector<int64_t> geometry,
                    int64_t ep_rank, int64_t num_tokens, int64_t tokens_per_rank,
                    int64_t hidden_size, ScalarType dtype, int64_t timeout_sec, bool enable_pdl,
                    bool low_precision) {
  const CombineInputs inputs{workspace, expert_output, active_rank_mask, geometry,
                             ep_rank,   num_tokens,    tokens_per_rank,  hidden_size,
                             dtype,     timeout_sec,   low_precision};
  cake::CombineParams p = combine_args(inputs);
  const CudaCall call(workspace);
  DeviceWorkspaceState& state = begin_call(p.workspace, call);
  Tensor output = fresh_sums(p, inputs);
  run(p, call, state, enable_pdl);
  return output;
}

void cake_combine_out(Tensor workspace, std::optional<Tensor> expert_output,
                      std::optional<Tensor> active_rank_mask, std::vector<int64_t> geometry,
                      int64_t ep_rank, int64_t tokens_per_rank, int64_t timeout_sec, Tensor output,
                      bool enable_pdl, bool low_precision) {
  check_sums(output);
  cake::CombineParams p = combine_args({workspace, expert_output, active_rank_mask, geometry,
                                        ep_rank, output.size(0), tokens_per_rank, output.size(1),
                                        output.scalar_type(), timeout_sec, low_precision});
  set_sums(p, output, workspace);
  const CudaCall call(workspace);
  run(p, call, begin_call(p.workspace, call), enable_pdl);
}

std::tuple<Tensor, Tensor> cake_combine_quantized(
    Tensor workspace, std::optional<Tensor> expert_output, std::optional<Tensor> active_rank_mask,
    std::vector<int64_t> geometry, int64_t ep_rank, int64_t num_tokens, int64_t tokens_per_rank,
    int64_t hidden_size, ScalarType dtype, int64_t timeout_sec, int64_t format,
    int64_t scale_layout, double scalar_scale, bool enable_pdl, bool low_precision) {
  const CombineInputs inputs{workspace, expert_output, active_rank_mask, geometry,
                             ep_rank,   num_tokens,    tokens_per_rank,  hidden_size,
                             dtype,     timeout_sec,   low_precision};
  cake::CombineParams p = combine_args(inputs);
  const CudaCall call(workspace);
  DeviceWorkspaceState& state = begin_call(p.workspace, call);
  QuantizedSums sums = fresh_quantized_sums(inputs, format, scale_layout, scalar_scale);
  p.quantized = &sums.rows;
  run(p, call, state, enable_pdl);
  return {sums.values, sums.scales};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CUDA, m) {
  m.impl("cake_combine", TORCH_BOX(&cake_combine));
  m.impl("cake_combine_out", TORCH_BOX(&cake_combine_out));
  m.impl("cake_combine_quantized", TORCH_BOX(&cake_combine_quantized));
}

}  // namespace moe_ep::ops
