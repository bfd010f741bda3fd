#include "one_sided/dispatch_put.h"

#include <algorithm>
#include <cstdint>

#include "one_sided/combine_plan.h"
#include "one_sided/copy_outputs.h"
#include "one_sided/cuda_launch.h"
#include "one_sided/dispatch_put.cuh"

namespace moe_ep::one_sided {
namespace {

constexpr uint32_t kPiecesAtHand = 2;  // of a warp

template <bool kAligned>
cudaError_t launch_put(const DispatchKernelParams& p, const CudaContext& context) {
  constexpr int kMaxWords = kMaxEpSize / kWarpSize;
  constexpr int kWarps = kInPlaceThreads / kWarpSize;
  int multiprocessors = 0;
  const cudaError_t error = multiprocessors_to_fill(&multiprocessors);
  if (error != cudaSuccess) return error;
  const PieceShape shape = PieceShape::of(p, PutPiece<kAligned>::kChunks);
  // By tokens_per_rank and not by num_tokens: blank rows need multiprocessors just as well.
  const uint64_t items =
      static_cast<uint64_t>(p.tokens_per_rank) * static_cast<uint32_t>(shape.pieces);
  if (items > kMaxItems) return cudaErrorInvalidValue;
  // Few items are spread over all multiprocessors, a warp of each. The registers of two CTAs do not
  // fit on one: a grid that is launched early does not pile up on a few.
  const int ctas = ctas_for(items, 1, multiprocessors);
  const uint32_t num_items =
      static_cast<uint32_t>(p.num_tokens) * static_cast<uint32_t>(shape.pieces);
  const PutParams params{
      .dispatch = p,
      .table = RouteTableShape::of(p.workspace.ep_size, p.tokens_per_rank),
      .shape = shape,
      .first_payload = shape.first_payload(),
      .num_items = num_items,
      .share = Share(num_items, static_cast<uint32_t>(ctas), kWarps, kPiecesAtHand),
  };
  const LaunchShape launch_shape{
      .ctas = ctas,
      .threads = kInPlaceThreads,
      .shared_bytes = params.table.bytes(p.workspace.ep_size),
  };
  auto* const kernel = p.workspace.ep_size <= kWarpSize ? &dispatch_put_kernel<1, kAligned>
                                                        : &dispatch_put_kernel<kMaxWords, kAligned>;
  const cudaError_t launched = launch(kernel, launch_shape, context, params);
  return launched != cudaSuccess ? launched : launch_copy_outputs(p, context);
}

}  // namespace

cudaError_t launch_dispatch_put(const DispatchKernelParams& p, const CudaContext& context) {
  return all_payloads_are_aligned(p) ? launch_put<true>(p, context) : launch_put<false>(p, context);
}

}  // namespace moe_ep::one_sided
