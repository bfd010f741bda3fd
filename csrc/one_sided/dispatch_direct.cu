#include "one_sided/dispatch_direct.h"

#include <algorithm>
#include <cstdint>

#include "one_sided/copy_outputs.h"
#include "one_sided/cuda_launch.h"
#include "one_sided/dispatch_direct.cuh"
#include "one_sided/small_steps.h"

namespace moe_ep::one_sided {
namespace {

static_assert(kMaxDirectDispatchTokens <= DirectRoutes::kMaxTokens);
static_assert(kMaxDirectDispatchRanks <= kWarpSize);

constexpr int kThreads = kDirectDispatchThreads;
static_assert(kThreads >= DirectRoutes::kMaxTokens);
static_assert(kThreads >= kMaxDirectDispatchRanks, "a thread signals to a rank");

DirectDispatchParams in_pieces(const DispatchKernelParams& p) {
  DirectDispatchParams params{
      .dispatch = p,
      .shape = PieceShape::of(p, SentPiece::kChunks),
      .group_bits = 0,
      .owners = EvenOwners::of(p.partition, p.workspace.ep_size),
  };
  while ((kGroupTokens << params.group_bits) < p.tokens_per_rank) ++params.group_bits;
  return params;
}

}  // namespace

cudaError_t launch_dispatch_direct(const DispatchKernelParams& p, const CudaContext& context) {
  // Not reached: see is_dispatched_directly.
  if (p.workspace.ep_size > kWarpSize || p.tokens_per_rank > DirectRoutes::kMaxTokens) {
    return cudaErrorInvalidValue;
  }
  const DirectDispatchParams params = in_pieces(p);
  // By tokens_per_rank and not by num_tokens: grids are sized by what the ranks share. A token's
  // picks are one task more.
  const int64_t tasks = p.tokens_per_rank * (int64_t{params.shape.pieces} + 1);
  // No machine has room for such rows.
  if (tasks > INT32_MAX / 2) return cudaErrorInvalidValue;

  int multiprocessors = 0;
  const cudaError_t error = multiprocessors_to_fill(&multiprocessors);
  if (error != cudaSuccess) return error;
  constexpr int64_t warps = kThreads / kWarpSize;
  const LaunchShape shape{
      .ctas = static_cast<int>(
          std::clamp<int64_t>((tasks + warps - 1) / warps, 1,
                              std::min(multiprocessors * kDirectDispatchCtasPerSm, 65535))),
      .threads = kThreads,
      .shared_bytes = 0,
  };
  const bool is_usual =
      params.owners.are_even && p.ids_are_vectors && p.workspace.top_k == UsualIds::kIds;
  auto* const kernel = is_usual          ? &dispatch_direct_kernel<UsualIdShare>
                       : p.ids_are_int64 ? &dispatch_direct_kernel<IdShare<int64_t>>
                                         : &dispatch_direct_kernel<IdShare<int32_t>>;
  const cudaError_t launched = launch(kernel, shape, context, params);
  return launched != cudaSuccess ? launched : launch_copy_outputs(p, context);
}

}  // namespace moe_ep::one_sided
