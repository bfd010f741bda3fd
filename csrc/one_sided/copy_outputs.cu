#include "one_sided/copy_outputs.h"

#include <algorithm>
#include <cstdint>

#include "one_sided/cuda_launch.h"
#include "one_sided/device/copy_outputs.cuh"

namespace moe_ep::one_sided {
namespace {

bool outputs_are_in_workspace(const DispatchKernelParams& p) {
  const DeviceWorkspace& w = p.workspace;
  const uint8_t* const own = w.base + w.ep_rank * w.rank_stride;
  const auto* ids = reinterpret_cast<const uint8_t*>(p.out_topk_ids);
  const auto* weights = reinterpret_cast<const uint8_t*>(p.out_topk_weights);
  return ids == own + w.layout.topk_ids.offset &&
         (weights == nullptr || weights == own + w.layout.topk_weights.offset);
}

}  // namespace

cudaError_t launch_copy_outputs(const DispatchKernelParams& p, const CudaContext& context) {
  constexpr int64_t kWordsPerThread = 16;
  constexpr int64_t kCtasPerMultiprocessor = 4;
  const int64_t words = static_cast<int64_t>(p.tokens_per_rank) * p.workspace.top_k;
  if (words == 0 || outputs_are_in_workspace(p)) return cudaSuccess;
  int multiprocessors = 0;
  const cudaError_t error = multiprocessors_to_fill(&multiprocessors);
  if (error != cudaSuccess) return error;
  const int64_t wanted = (words - 1) / (kCopyThreads * kWordsPerThread) + 1;
  const int64_t most =
      std::max<int64_t>(kCtasPerMultiprocessor * multiprocessors / p.workspace.ep_size, 1);
  const LaunchShape shape{
      .ctas = static_cast<int>(std::min(wanted, most)) * p.workspace.ep_size,
      .threads = kCopyThreads,
      .shared_bytes = 0,
  };
  return launch(&copy_outputs_kernel, shape, context, p);
}

}  // namespace moe_ep::one_sided
