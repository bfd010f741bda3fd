// The combine kernels that need no copy engine and what launches them. All of them form the same
// sums: a token's rows in ascending order of their ranks, in float32, rounded once.
#pragma once

#include <cuda_runtime_api.h>

#include "one_sided/cuda.h"
#include "one_sided/cuda_params.h"

namespace moe_ep::one_sided {

// Each launches one kernel and does not wait for it. cudaErrorInvalidValue: rows or steps so large
// that their pieces cannot be counted in 31 bits (a row of 16 GiB, 1 TiB of output).

// Very few tokens: their owners push the rows to the source, as packets. p.tokens_per_rank is at
// most push_tokens, see small_steps.h.
cudaError_t launch_combine_push(const CombineKernelParams& p, const CudaContext& context);

// Few tokens: summed from registers, all rows of a token in flight.
cudaError_t launch_combine_direct(const CombineKernelParams& p, const CudaContext& context);

// Any number of tokens: from registers, too, with as many vectors of a token's rows in flight.
cudaError_t launch_combine_get(const CombineKernelParams& p, const CudaContext& context);

// Any number of tokens whose rows travel as scaled FP8; p.expert_output is given, and p.pitch is
// that of such a row. The sums are rounded to p.output, or to p.quantized if p.output_is_quantized.
cudaError_t launch_combine_fp8(const CombineKernelParams& p, const CudaContext& context);

// Any number of tokens; the sums are rounded to p.quantized instead of p.output.
cudaError_t launch_combine_quantized(const CombineKernelParams& p, const CudaContext& context);

}  // namespace moe_ep::one_sided
