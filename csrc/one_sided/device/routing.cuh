// Which ranks a token goes to. Sets of ranks are 32-bit words, so that lane r of a warp can stand
// for rank r: rank 32 * w + r is bit r of word w.
#pragma once

#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/workspace.cuh"
#include "transport/device/warp.cuh"

namespace moe_ep::one_sided {

template <int kWords>
struct RankSet {
  uint32_t words[kWords];

  __device__ bool contains(int32_t rank) const {
    bool found = false;  // no run-time index: the words stay in registers
#pragma unroll
    for (int w = 0; w < kWords; ++w) found |= w == rank / 32 && ((words[w] >> (rank % 32)) & 1);
    return found;
  }
  __device__ void insert_if(bool condition, int32_t rank) {
    const uint32_t bit = (condition ? 1u : 0u) << (rank % 32);
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] |= kWords == 1 || w == rank / 32 ? bit : 0;
  }
};

// The ranks that take part in the round.
template <int kWords>
__device__ RankSet<kWords> active_ranks(const DeviceWorkspace& workspace,
                                        const ActiveRanks& active) {
  RankSet<kWords> set;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const uint64_t pair = active.on_device == nullptr ? active.fixed.words[w / 2]
                          : w * 32 < workspace.ep_size
                              ? *const_cast<const volatile uint64_t*>(active.on_device + w / 2)
                              : 0;
    const uint32_t word = static_cast<uint32_t>(pair >> (w % 2 * 32));
    const int32_t ranks = min(max(workspace.ep_size - w * 32, 0), 32);
    set.words[w] = ranks == 32 ? word : word & bits_below(ranks);
  }
  return set;
}

// Hash of what must be the same on all active ranks of a round.
template <int kWords>
__device__ uint32_t round_signature(const DispatchKernelParams& p, const RankSet<kWords>& active) {
  uint32_t hash = p.signature;
#pragma unroll
  for (int w = 0; w < kWords; ++w) hash = (hash ^ active.words[w]) * 0x9E3779B1u;
  return hash;
}

__device__ inline int64_t expert_id(const DispatchKernelParams& p, int32_t token, int32_t slot) {
  const int64_t i = static_cast<int64_t>(token) * p.workspace.top_k + slot;
  return p.ids_are_int64 ? static_cast<const int64_t*>(p.topk_ids)[i]
                         : static_cast<const int32_t*>(p.topk_ids)[i];
}

// Neither an expert nor padding: an input error.
__device__ inline bool is_invalid(const DispatchKernelParams& p, int64_t expert) {
  return expert >= 0 && expert != p.invalid_expert_id && !p.partition.contains(expert);
}

// An id as the receivers see it: what lies outside [0, num_experts) arrives as the invalid id.
__device__ inline int32_t id_to_send(const DispatchKernelParams& p, int64_t expert) {
  return p.partition.contains(expert) ? static_cast<int32_t>(expert) : p.invalid_expert_id;
}

template <int kWords>
__device__ void add_owner(const DispatchKernelParams& p, int32_t expert, RankSet<kWords>& set) {
  const bool exists = p.partition.contains(expert);
  set.insert_if(exists, p.partition.owner_of(exists ? expert : 0));  // no branch
}

// Tells the host about an id that is neither an expert nor padding. Each such slot is reported by
// one thread once a round; a lock, since this is rare and must name the first one.
__device__ inline void record_invalid_id(const DispatchKernelParams& p, int32_t token, int32_t slot,
                                         int64_t expert) {
  InvalidIdRecord* record = &p.workspace.page->invalid_id;
  uint32_t* lock = &own_segment(p.workspace).state()->invalid_id_lock;
  for (bool done = false; !done;) {  // the lock is released inside the loop: lanes of a warp share
    if (atomicCAS(lock, 0u, 1u) == 0) {
      __threadfence_system();
      volatile InvalidIdRecord* r = record;
      const uint32_t count = r->count;
      if (count == 0 || token < r->token || (token == r->token && slot < r->slot)) {
        r->token = token;
        r->slot = slot;
        r->expert_id = expert;
        r->num_experts = p.partition.num_experts();
      }
      __threadfence_system();
      r->count = count + 1;
      __threadfence_system();
      atomicExch(lock, 0u);
      done = true;
    }
  }
}

}  // namespace moe_ep::one_sided
