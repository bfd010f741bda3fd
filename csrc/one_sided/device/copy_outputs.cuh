// Received ids and weights, from the workspace to tensors of their own: for compiled graphs, which
// may keep them beyond the round.
#pragma once

#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::one_sided {

inline constexpr int kCopyThreads = 256;

// One block of `unit`s of int32 or float: the first `used` are copied, the rest filled.
template <typename Unit>
__device__ void copy_block(Unit* to, const Unit* from, int64_t used, int64_t count, Unit fill,
                           int64_t first, int64_t stride) {
  for (int64_t i = first; i < count; i += stride) to[i] = i < used ? from[i] : fill;
}

// CTA c takes part of the block of source c % ep_size. Rows without a token have invalid ids in the
// workspace already; their weights become 0.
__global__ void __launch_bounds__(kCopyThreads)
    copy_outputs_kernel(const __grid_constant__ DispatchKernelParams p) {
  wait_for_previous_kernel();
  const DeviceSegment own = own_segment(p.workspace);
  const auto ranks = static_cast<uint32_t>(p.workspace.ep_size);
  const auto source = static_cast<int32_t>(blockIdx.x % ranks);
  const int64_t first = static_cast<int64_t>(blockIdx.x / ranks) * blockDim.x + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x / ranks) * blockDim.x;
  const int32_t top_k = p.workspace.top_k;
  const int64_t first_row = static_cast<int64_t>(source) * p.tokens_per_rank;
  const int64_t count = static_cast<int64_t>(p.tokens_per_rank) * top_k;
  const int64_t used = static_cast<int64_t>(own.recv_counts()[source]) * top_k;
  const int32_t* const ids = own.topk_ids(first_row);
  const float* const weights = own.topk_weights(first_row);
  int32_t* const out_ids = p.out_topk_ids + first_row * top_k;
  float* const out_weights = p.out_topk_weights + first_row * top_k;
  const bool copies_ids = p.out_topk_ids != own.topk_ids(0);
  const bool copies_weights =
      p.out_topk_weights != nullptr && p.out_topk_weights != own.topk_weights(0);
  const uint64_t bits =
      reinterpret_cast<uint64_t>(p.out_topk_ids) | reinterpret_cast<uint64_t>(p.out_topk_weights);
  if (top_k % 4 == 0 && bits % sizeof(int4) == 0) {
    if (copies_ids) {
      copy_block(reinterpret_cast<int4*>(out_ids), reinterpret_cast<const int4*>(ids), count / 4,
                 count / 4, int4{}, first, stride);
    }
    if (copies_weights) {
      copy_block(reinterpret_cast<float4*>(out_weights), reinterpret_cast<const float4*>(weights),
                 used / 4, count / 4, float4{}, first, stride);
    }
  } else {
    if (copies_ids) copy_block(out_ids, ids, count, count, 0, first, stride);
    if (copies_weights) copy_block(out_weights, weights, used, count, 0.0f, first, stride);
  }
}

}  // namespace moe_ep::one_sided
