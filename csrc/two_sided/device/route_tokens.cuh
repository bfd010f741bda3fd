// Where the tokens of a rank go, by one CTA: it counts, then writes the lists. Each warp has tokens
// that follow each other, so that the lists are in their order.
#pragma once

#include <cstdint>

#include "transport/device/bit_columns.cuh"
#include "transport/device/warp.cuh"
#include "two_sided/cuda_params.h"

namespace moe_ep::two_sided {

inline constexpr int kPrepareThreads = 1024;
inline constexpr int kPrepareWarps = kPrepareThreads / kWarpSize;

__device__ inline int64_t expert_id(const PrepareParams& call, int64_t index) {
  return call.ids_are_int64 ? static_cast<const int64_t*>(call.topk_ids)[index]
                            : static_cast<const int32_t*>(call.topk_ids)[index];
}

class TokenRouting {
 public:
  // In shared memory.
  struct Counts {
    int32_t of_warp[kPrepareWarps]
                   [kMaxEpSize];  // rows for a rank; then, where those of a warp begin
    int32_t total[kMaxEpSize];
  };

  __device__ TokenRouting(const PrepareKernelParams& p, Counts& counts)
      : p_(p),
        counts_(counts),
        ep_size_(p.call.workspace.geometry.ep_size),
        groups_((p.call.num_tokens + kWarpSize - 1) / kWarpSize) {}

  // Counts the rows for each rank, finds where each list begins, and writes the lists. All threads.
  __device__ void run(int32_t* list_begins) {
    count();
    __syncthreads();
    for (int32_t rank = static_cast<int32_t>(threadIdx.x); rank < ep_size_;
         rank += kPrepareThreads) {
      int32_t rows = 0;
      for (auto& of_warp : counts_.of_warp) {
        const int32_t more = of_warp[rank];
        of_warp[rank] = rows;
        rows += more;
      }
      counts_.total[rank] = rows;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int32_t begin = 0;
      for (int32_t rank = 0; rank < ep_size_; ++rank) {
        list_begins[rank] = begin;
        begin += counts_.total[rank];
      }
    }
    __syncthreads();
    write(list_begins);
    __syncthreads();
  }

 private:
  // Calls visit(tokens, ranks, first) for each group of 32 tokens of this warp, with the ranks of a
  // window of 32: lane l gets the tokens of rank l of the window, and the ranks of token first + l.
  template <typename Visit>
  __device__ void for_each_group(int32_t window, const Visit& visit) const {
    const auto warp = static_cast<int64_t>(threadIdx.x / kWarpSize);
    const auto end = static_cast<int32_t>(groups_ * (warp + 1) / kPrepareWarps);
    for (auto group = static_cast<int32_t>(groups_ * warp / kPrepareWarps); group < end; ++group) {
      const int32_t first = group * kWarpSize;
      const uint32_t ranks = ranks_of(first + lane_id(), window);
      visit(transposed(ranks, min(ep_size_ - window * kWarpSize, kWarpSize)), ranks, first);
    }
  }

  // The ranks of a window that a token goes to; none of a token that there is not.
  __device__ uint32_t ranks_of(int32_t token, int32_t window) const {
    if (token >= p_.call.num_tokens) return 0;
    const int32_t top_k = p_.call.workspace.geometry.top_k;
    uint32_t ranks = 0;
#pragma unroll 8
    for (int32_t k = 0; k < top_k; ++k) {
      const int64_t expert = expert_id(p_.call, static_cast<int64_t>(token) * top_k + k);
      if (!p_.partition.contains(expert)) continue;
      const int32_t owner = p_.partition.owner_of(static_cast<int32_t>(expert));
      if (owner / kWarpSize == window) ranks |= 1u << (owner % kWarpSize);
    }
    return ranks;
  }

  __device__ void count() {
    for (int32_t window = 0; window * kWarpSize < ep_size_; ++window) {
      int32_t rows = 0;
      for_each_group(window, [&](uint32_t tokens, uint32_t, int32_t) { rows += __popc(tokens); });
      counts_.of_warp[threadIdx.x / kWarpSize][window * kWarpSize + lane_id()] = rows;
    }
  }

  __device__ void write(const int32_t* list_begins) const {
    for (int32_t window = 0; window * kWarpSize < ep_size_; ++window) {
      const int32_t rank = window * kWarpSize + lane_id();
      const bool is_rank = rank < ep_size_;
      int32_t next = is_rank ? list_begins[rank] : 0;
      if (is_rank) next += counts_.of_warp[threadIdx.x / kWarpSize][rank];
      for_each_group(window, [&](uint32_t tokens, uint32_t ranks, int32_t first) {
        uint32_t with_tokens = __ballot_sync(kAllLanes, is_rank && tokens != 0);
        for (; with_tokens != 0; with_tokens &= with_tokens - 1) {
          const int32_t lane = __ffs(static_cast<int>(with_tokens)) - 1;
          const uint32_t of_rank = __shfl_sync(kAllLanes, tokens, lane);
          const int32_t at = __shfl_sync(kAllLanes, next, lane);
          if ((ranks >> lane) & 1) {
            p_.call.out_send_tokens[at + __popc(of_rank & bits_below(lane_id()))] =
                first + lane_id();
          }
        }
        next += is_rank ? __popc(tokens) : 0;
      });
    }
  }

  const PrepareKernelParams& p_;
  Counts& counts_;
  int32_t ep_size_;
  int64_t groups_;
};

// How many of a list's tokens, which ascend, are in front of `token`.
__device__ inline int32_t rows_before(const int32_t* list, int32_t rows, int32_t token) {
  int32_t low = 0;
  while (low < rows) {
    const int32_t middle = low + (rows - low) / 2;
    if (list[middle] < token) {
      low = middle + 1;
    } else {
      rows = middle;
    }
  }
  return low;
}

}  // namespace moe_ep::two_sided
