#include "one_sided/row_copies.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "core/limits.h"

namespace moe_ep::one_sided {
namespace {

constexpr int kThreads = 256;
// Of a grid: every multiprocessor is full, and each CTA has rows to go on with.
constexpr int64_t kMaxCtas = 2048;

// Loads of a thread that are under way at a time: one after the other would each wait for memory.
constexpr int kLoads = 4;

// Unit: the widest type that fills a row evenly.
template <typename Unit>
__global__ void copy_received_rows_kernel(const __grid_constant__ ReceivedRows p) {
  const int64_t units = p.row_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t rows = static_cast<int64_t>(p.ep_size) * p.tokens_per_rank;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const auto source = static_cast<int32_t>(row / p.tokens_per_rank);
    const bool used =
        row - static_cast<int64_t>(source) * p.tokens_per_rank < p.recv_counts[source];
    const auto* from = reinterpret_cast<const Unit*>(p.rows + static_cast<uint64_t>(row) * p.pitch);
    auto* to = reinterpret_cast<Unit*>(p.out + row * p.row_bytes);
    for (int64_t first = threadIdx.x; first < units; first += kLoads * kThreads) {
      Unit held[kLoads] = {};
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (used && first + i * kThreads < units) held[i] = from[first + i * kThreads];
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (first + i * kThreads < units) to[first + i * kThreads] = held[i];
      }
    }
  }
}

__global__ void sanitize_expert_ids_kernel(const __grid_constant__ IdsToSanitize p) {
  const int64_t block = p.tokens_per_rank * p.top_k;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t source = blockIdx.y; source < p.num_sources; source += gridDim.y) {
    const int64_t used =
        min(max(static_cast<int64_t>(p.counts[source]), int64_t{0}), p.tokens_per_rank) * p.top_k;
    int32_t* ids = p.ids + source * block;
    for (int64_t i = used + thread; i < block; i += threads) ids[i] = p.invalid_expert_id;
  }
}

template <typename Unit>
void launch_copy(const ReceivedRows& p, unsigned ctas, cudaStream_t stream) {
  copy_received_rows_kernel<Unit><<<ctas, kThreads, 0, stream>>>(p);
}

}  // namespace

cudaError_t launch_copy_received_rows(const ReceivedRows& p, cudaStream_t stream) {
  const int64_t rows = static_cast<int64_t>(p.ep_size) * p.tokens_per_rank;
  if (rows == 0 || p.row_bytes == 0) return cudaSuccess;
  const auto ctas = static_cast<unsigned>(std::min(rows, kMaxCtas));
  if (p.row_bytes % static_cast<int64_t>(sizeof(uint4)) == 0) {
    launch_copy<uint4>(p, ctas, stream);
  } else if (p.row_bytes % static_cast<int64_t>(sizeof(uint32_t)) == 0) {
    launch_copy<uint32_t>(p, ctas, stream);
  } else {
    launch_copy<uint8_t>(p, ctas, stream);
  }
  return cudaGetLastError();
}

cudaError_t launch_sanitize_expert_ids(const IdsToSanitize& p, cudaStream_t stream) {
  const int64_t block = p.tokens_per_rank * p.top_k;
  if (p.num_sources == 0 || block == 0) return cudaSuccess;
  constexpr int64_t kMaxCtasOfASource = 64;
  const dim3 grid(
      static_cast<unsigned>(std::min((block + kThreads - 1) / kThreads, kMaxCtasOfASource)),
      static_cast<unsigned>(std::min<int64_t>(p.num_sources, kMaxEpSize)));
  sanitize_expert_ids_kernel<<<grid, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace moe_ep::one_sided
