// The ops combine, combine_out and combine_quantized of the one-sided backends for CUDA tensors.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "cake/cuda.h"
#include "one_sided/cuda.h"
#include "ops/combine_args.h"
#include "ops/device_rounds.h"
#include "ops/device_workspaces.h"
#include "ops/errors.h"
#include "ops/one_sided_backends.h"
#include "ops/tensor_args.h"

namespace moe_ep::ops {
namespace {

template <auto kLaunch>
void run(const one_sided::CombineParams& p, const CudaCall& call, DeviceWorkspaceState& state,
         bool enable_pdl) {
  close_round(p.workspace, call, state,
              [&] { return kLaunch(p, {call.stream(), state.page, nullptr, enable_pdl}); });
}

// Sums that are quantised themselves are always of rows that travel as FP8.
template <auto kLaunch>
inline constexpr bool kReaderCanQuantize = kLaunch == &cake::launch_combine;

template <auto kLaunch>
Tensor combine(Tensor workspace, std::optional<Tensor> expert_output,
               std::optional<Tensor> active_rank_mask, std::vector<int64_t> geometry,
               int64_t ep_rank, int64_t num_tokens, int64_t tokens_per_rank, int64_t hidden_size,
               ScalarType dtype, int64_t timeout_sec, bool enable_pdl, bool low_precision) {
  const CombineInputs inputs{workspace,       expert_output, active_rank_mask,
                             geometry,        ep_rank,       num_tokens,
                             tokens_per_rank, hidden_size,   dtype,
                             timeout_sec,     low_precision, kReaderCanQuantize<kLaunch>};
  one_sided::CombineParams p = combine_args(inputs);
  const CudaCall call(workspace);
  DeviceWorkspaceState& state = begin_call(p.workspace, call);
  Tensor output = fresh_sums(p, inputs);
  run<kLaunch>(p, call, state, enable_pdl);
  return output;
}

template <auto kLaunch>
void combine_out(Tensor workspace, std::optional<Tensor> expert_output,
                 std::optional<Tensor> active_rank_mask, std::vector<int64_t> geometry,
                 int64_t ep_rank, int64_t tokens_per_rank, int64_t timeout_sec, Tensor output,
                 bool enable_pdl, bool low_precision) {
  check_sums(output);
  one_sided::CombineParams p =
      combine_args({workspace, expert_output, active_rank_mask, geometry, ep_rank, output.size(0),
                    tokens_per_rank, output.size(1), output.scalar_type(), timeout_sec,
                    low_precision, kReaderCanQuantize<kLaunch>});
  set_sums(p, output, workspace);
  const CudaCall call(workspace);
  run<kLaunch>(p, call, begin_call(p.workspace, call), enable_pdl);
}

template <auto kLaunch>
std::tuple<Tensor, Tensor> combine_quantized(
    Tensor workspace, std::optional<Tensor> expert_output, std::optional<Tensor> active_rank_mask,
    std::vector<int64_t> geometry, int64_t ep_rank, int64_t num_tokens, int64_t tokens_per_rank,
    int64_t hidden_size, ScalarType dtype, int64_t timeout_sec, int64_t format,
    int64_t scale_layout, double scalar_scale, bool enable_pdl, bool low_precision) {
  const CombineInputs inputs{workspace, expert_output, active_rank_mask, geometry,
                             ep_rank,   num_tokens,    tokens_per_rank,  hidden_size,
                             dtype,     timeout_sec,   low_precision};
  one_sided::CombineParams p = combine_args(inputs);
  const CudaCall call(workspace);
  DeviceWorkspaceState& state = begin_call(p.workspace, call);
  QuantizedSums sums = fresh_quantized_sums(inputs, format, scale_layout, scalar_scale);
  p.quantized = &sums.rows;
  run<kLaunch>(p, call, state, enable_pdl);
  return {sums.values, sums.scales};
}

// kLaunch: how a combine of the backend goes.
template <auto kLaunch, typename Library>
void implement(Library& m, const char* backend) {
  m.impl(op_of(backend, "combine").c_str(), TORCH_BOX(&combine<kLaunch>));
  m.impl(op_of(backend, "combine_out").c_str(), TORCH_BOX(&combine_out<kLaunch>));
  m.impl(op_of(backend, "combine_quantized").c_str(), TORCH_BOX(&combine_quantized<kLaunch>));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_ep, CUDA, m) {
  implement<&cake::launch_combine>(m, kCake);
  implement<&one_sided::launch_combine>(m, kOneSided);
}

}  // namespace moe_ep::ops
