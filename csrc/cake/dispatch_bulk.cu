#include "cake/dispatch_bulk.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cake/cuda_launch.h"
#include "cake/device/copy_outputs.cuh"
#include "cake/dispatch_bulk.cuh"

namespace moe_ep::cake {
namespace {

// Shared memory of a CTA on all supported devices, less what the compiler may want.
constexpr int kMaxSharedBytes = 226 * 1024;
// More than half of a multiprocessor's: a grid that is launched early must not pile up on a few.
constexpr int kMinSharedBytes = 118 * 1024;

// Best on an H200, rows of 14336 bytes: 7 warps of 2 stages, whole rows. A stage holds at most so
// much; longer records go in parts.
constexpr uint64_t kMaxPartBytes = 16896;
constexpr int32_t kMaxWarps = kBulkDispatchThreads / kWarpSize;
constexpr int32_t kMinStages = 2;
// To be measured for rows below 4 KiB, where stages are small and many fit.
constexpr int32_t kMaxStages = 8;

// Few tokens go in parts, so that every multiprocessor has some (best on an H200: 4 parts at 64
// and 128 tokens, 2 at 256, 1 from 512). Parts below 2 KiB cost more than they bring.
constexpr uint32_t kMaxPartsOfFewTokens = 4;
constexpr int64_t kItemsPerMultiprocessor = 2;
constexpr uint64_t kMinPartBytes = 2048;
// Parts begin on whole cache lines of the receiver.
constexpr uint64_t kPartAlignment = kRegionAlignment;

constexpr uint64_t quotient_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

PipelineShape pipeline_shape(uint64_t record_bytes, int32_t tokens_per_rank, int multiprocessors,
                             int shared_bytes) {
  uint64_t parts = std::max<uint64_t>(quotient_up(record_bytes, kMaxPartBytes), 1);
  while (parts < kMaxPartsOfFewTokens && record_bytes / (2 * parts) >= kMinPartBytes &&
         tokens_per_rank * static_cast<int64_t>(parts) <
             kItemsPerMultiprocessor * multiprocessors) {
    parts *= 2;
  }
  PipelineShape shape{};
  shape.record_bytes = record_bytes;
  if (parts == 1) {
    shape.parts = 1;
    shape.part_bytes = static_cast<uint32_t>(std::max(record_bytes, kRowAlignment));
  } else {
    const uint64_t bytes =
        quotient_up(quotient_up(record_bytes, parts), kPartAlignment) * kPartAlignment;
    shape.parts = static_cast<uint32_t>(quotient_up(record_bytes, bytes));
    shape.part_bytes = static_cast<uint32_t>(bytes);
  }
  const auto fitting = static_cast<int32_t>(static_cast<uint64_t>(shared_bytes) /
                                            (shape.part_bytes + sizeof(BulkBarrier)));
  shape.warps = std::min(fitting / kMinStages, kMaxWarps);
  shape.stages = std::min(fitting / shape.warps, kMaxStages);
  return shape;
}

uint64_t record_bytes(const DispatchKernelParams& p) {
  uint64_t bytes = 0;
  for (int32_t i = 0; i < p.num_payloads; ++i) bytes += p.placement.pitch[i];
  return bytes;
}

bool outputs_are_in_workspace(const DispatchKernelParams& p) {
  const DeviceWorkspace& w = p.workspace;
  const uint8_t* const own = w.base + w.ep_rank * w.rank_stride;
  const auto* ids = reinterpret_cast<const uint8_t*>(p.out_topk_ids);
  const auto* weights = reinterpret_cast<const uint8_t*>(p.out_topk_weights);
  return ids == own + w.layout.topk_ids.offset &&
         (weights == nullptr || weights == own + w.layout.topk_weights.offset);
}

template <int kWords>
auto* kernel_for_alignment(const DispatchKernelParams& p) {
  const bool aligned = std::all_of(p.payload_is_aligned, p.payload_is_aligned + p.num_payloads,
                                   [](bool is_aligned) { return is_aligned; });
  return aligned ? &dispatch_bulk_kernel<kWords, true> : &dispatch_bulk_kernel<kWords, false>;
}

auto* kernel_for(const DispatchKernelParams& p) {
  return p.workspace.ep_size <= kWarpSize ? kernel_for_alignment<1>(p)
                                          : kernel_for_alignment<kMaxEpSize / kWarpSize>(p);
}

cudaError_t launch_copy_outputs(const DispatchKernelParams& p, int multiprocessors,
                                const CudaContext& context) {
  constexpr int64_t kWordsPerThread = 16;
  constexpr int64_t kCtasPerMultiprocessor = 4;
  const int64_t words = static_cast<int64_t>(p.tokens_per_rank) * p.workspace.top_k;
  if (words == 0) return cudaSuccess;
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

}  // namespace

cudaError_t launch_dispatch_bulk(const DispatchKernelParams& p, const CudaContext& context) {
  int multiprocessors = 0;
  cudaError_t error = multiprocessor_count(&multiprocessors);
  if (error != cudaSuccess) return error;

  // By tokens_per_rank and not by num_tokens: an SM more is needed for blank rows just as well.
  BulkDispatchParams params{.dispatch = p, .pipeline = {}, .table = {}};
  params.table = RouteTableShape::of(p.workspace.ep_size, p.tokens_per_rank);
  const int table_bytes = params.table.bytes(p.workspace.ep_size);
  params.pipeline = pipeline_shape(record_bytes(p), p.tokens_per_rank, multiprocessors,
                                   kMaxSharedBytes - table_bytes);
  const int64_t items = static_cast<int64_t>(p.tokens_per_rank) * params.pipeline.parts;
  // The counter runs past the last item by what all warps ask for in vain.
  constexpr int64_t kMaxItems = std::numeric_limits<uint32_t>::max() / 2;
  if (items > kMaxItems) return cudaErrorInvalidValue;

  const int64_t ctas = std::clamp<int64_t>(items, 1, std::min<int64_t>(multiprocessors, 65535));
  const LaunchShape shape{
      .ctas = static_cast<int>(ctas),
      .threads = kBulkDispatchThreads,
      .shared_bytes = std::max(params.pipeline.bytes() + table_bytes, kMinSharedBytes),
  };
  error = launch(kernel_for(p), shape, context, params);
  if (error != cudaSuccess || outputs_are_in_workspace(p)) return error;
  return launch_copy_outputs(p, multiprocessors, context);
}

}  // namespace moe_ep::cake
