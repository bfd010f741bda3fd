// The expert ids as receivers must see them, and those that are errors.
#pragma once

#include <cstdint>

#include "two_sided/cuda_params.h"
#include "two_sided/device/route_tokens.cuh"

namespace moe_ep::two_sided {

// In shared memory.
struct InvalidIds {
  uint32_t count;
  unsigned long long first;  // token * top_k + slot
};

// Neither an expert nor padding.
__device__ inline bool is_invalid(const PrepareKernelParams& p, int64_t expert) {
  return expert >= 0 && expert != p.call.invalid_expert_id && !p.partition.contains(expert);
}

// Tells the host. By one thread of a CTA; another CTA may do so at the same time.
__device__ inline void record_invalid_ids(const PrepareKernelParams& p, const InvalidIds& found) {
  volatile InvalidIdRecord* const record = &p.workspace.page->invalid_id;
  uint32_t* const lock = &p.workspace.own().device_round().invalid_id_lock;
  const auto top_k = static_cast<unsigned long long>(p.call.workspace.geometry.top_k);
  const auto token = static_cast<int32_t>(found.first / top_k);
  while (atomicCAS(lock, 0u, 1u) != 0) {
  }
  __threadfence_system();
  const uint32_t before = record->count;
  if (before == 0 || token < record->token) {
    record->token = token;
    record->slot = static_cast<int32_t>(found.first % top_k);
    record->expert_id = expert_id(p.call, static_cast<int64_t>(found.first));
    record->num_experts = p.partition.num_experts();
    __threadfence_system();  // the host sees the count last
  }
  record->count = before + found.count;
  __threadfence_system();
  atomicExch(lock, 0u);
}

// Of the tokens from `first` on. By all threads.
__device__ inline void write_ids(const PrepareKernelParams& p, int32_t first, int32_t end,
                                 InvalidIds& found) {
  if (threadIdx.x == 0) found = {0, ~0ull};
  __syncthreads();
  const auto top_k = static_cast<int64_t>(p.call.workspace.geometry.top_k);
#pragma unroll 4
  for (int64_t i = first * top_k + threadIdx.x; i < end * top_k; i += kPrepareThreads) {
    const int64_t expert = expert_id(p.call, i);
    p.call.out_topk_ids[i] =
        static_cast<int32_t>(p.partition.contains(expert) ? expert : p.call.invalid_expert_id);
    if (is_invalid(p, expert)) {
      atomicAdd(&found.count, 1u);
      atomicMin(&found.first, static_cast<unsigned long long>(i));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && found.count != 0) record_invalid_ids(p, found);
}

// Places of send_tokens that no token takes: what a result has must not depend on what was there.
__device__ inline void blank_rest(const PrepareKernelParams& p, int64_t used) {
  const int64_t places =
      static_cast<int64_t>(p.call.num_tokens) * p.call.workspace.geometry.max_destinations();
  const int64_t threads = int64_t{kPrepareThreads} * gridDim.x;
  const int64_t thread = int64_t{kPrepareThreads} * blockIdx.x + threadIdx.x;
  for (int64_t i = used + thread; i < places; i += threads) {
    p.call.out_send_tokens[i] = -1;
  }
}

}  // namespace moe_ep::two_sided
