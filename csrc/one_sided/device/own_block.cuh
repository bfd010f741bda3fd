// The rows that a rank fills at another one, with what stays the same from row to row computed
// once.
#pragma once

#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::one_sided {

// This rank's block of rows at rank `rank`. Of a rank at or above ep_size there is none, and only
// the constructor may be called.
class OwnBlock {
 public:
  __device__ OwnBlock(const DispatchKernelParams& p, int32_t rank)
      : rank_(rank),
        rows_(held(segment(p).payload_row(p.placement, 0, first_row(p)))),
        ids_(held(segment(p).topk_ids(first_row(p)))),
        weights_(held(segment(p).topk_weights(first_row(p)))) {}

  __device__ uint8_t* payload_row(const DispatchKernelParams& p, int32_t payload,
                                  uint32_t row) const {
    if (payload == 0) return rows_ + p.placement.pitch[0] * row;
    return segment(p).payload_row(p.placement, payload, first_row(p) + row);
  }
  __device__ int32_t* topk_ids(const DispatchKernelParams& p, uint32_t row) const {
    return ids_ + static_cast<uint64_t>(row) * static_cast<uint32_t>(p.workspace.top_k);
  }
  __device__ float* topk_weights(const DispatchKernelParams& p, uint32_t row) const {
    return weights_ + static_cast<uint64_t>(row) * static_cast<uint32_t>(p.workspace.top_k);
  }

  // Whether all of it is known, for schedule.cuh.
  __device__ uint64_t address_bits() const {
    return reinterpret_cast<uint64_t>(rows_) | reinterpret_cast<uint64_t>(ids_) |
           reinterpret_cast<uint64_t>(weights_);
  }

 private:
  __device__ DeviceSegment segment(const DispatchKernelParams& p) const {
    return {p.workspace, rank_};
  }
  __device__ static int64_t first_row(const DispatchKernelParams& p) {
    return static_cast<int64_t>(p.workspace.ep_rank) * p.tokens_per_rank;
  }

  int32_t rank_;
  uint8_t* rows_;  // of the first payload
  int32_t* ids_;
  float* weights_;
};

}  // namespace moe_ep::one_sided
