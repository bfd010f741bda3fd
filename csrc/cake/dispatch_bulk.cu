#include "cake/dispatch_bulk.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <limits>

#include "cake/dispatch_bulk.cuh"
#include "one_sided/copy_outputs.h"
#include "one_sided/cuda_launch.h"

namespace moe_ep::cake {
namespace {

// Shared memory of a CTA on all supported devices, less what the compiler may want.
constexpr int kMaxSharedBytes = 226 * 1024;
// More than half of a multiprocessor's: a grid that is launched early must not pile up on a few.
constexpr int kMinSharedBytes = 118 * 1024;

// Records go in parts, and a part is an item. Measured with rows of 14336 bytes, two ranks on one
// H200, 7 warps of 2 stages: 4 parts were best at 64 tokens a rank (1 a CTA) and at 512 (8), 2
// parts at 128 and at 4096 (70).
struct PartsOfTokens {
  int64_t tokens_per_cta;  // up to so many
  uint32_t parts;
};
constexpr PartsOfTokens kPartsTable[] = {{8, 4}, {std::numeric_limits<int64_t>::max(), 2}};
// Parts below 2 KiB cost more than they bring; above, a stage holds at most so much.
constexpr uint64_t kMinPartBytes = 2048;
constexpr uint64_t kMaxPartBytes = 16896;

// Eight warps and two stages keep enough bytes in flight if parts are not small: the variants above
// had 50 to 100 KiB a multiprocessor. Smaller parts need more of both (to be measured).
constexpr int32_t kWarps = 8;
constexpr int32_t kMaxWarps = kInPlaceThreads / kWarpSize;
constexpr uint64_t kFewWarpsPartBytes = 3072;
constexpr int32_t kMinStages = 2;
constexpr int32_t kMaxStages = 8;
constexpr uint64_t kBytesInFlight = 50 * 1024;

// Parts begin on whole cache lines of the receiver.
constexpr uint64_t kPartAlignment = kRegionAlignment;

constexpr uint64_t quotient_up(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

uint32_t knob(const char* name, uint32_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : static_cast<uint32_t>(std::atoi(text));
}

uint64_t parts_of(uint64_t record_bytes, int32_t tokens_per_rank, int ctas) {
  const auto* const entry = std::find_if(
      std::begin(kPartsTable), std::end(kPartsTable),
      [&](const PartsOfTokens& e) { return tokens_per_rank / ctas <= e.tokens_per_cta; });
  const uint64_t most = std::max<uint64_t>(record_bytes / kMinPartBytes, 1);
  const uint64_t least = std::max<uint64_t>(quotient_up(record_bytes, kMaxPartBytes), 1);
  return std::max(std::min<uint64_t>(knob("MOE_EP_PARTS", entry->parts), most), least);
}

uint64_t record_bytes(const DispatchKernelParams& p) {
  uint64_t bytes = 0;
  for (int32_t i = 0; i < p.num_payloads; ++i) bytes += p.placement.pitch[i];
  return bytes;
}

PipelineShape pipeline_shape(const DispatchKernelParams& p, int multiprocessors, int shared_bytes) {
  const uint64_t record_bytes = cake::record_bytes(p);
  const uint64_t parts = parts_of(record_bytes, p.tokens_per_rank, multiprocessors);
  PipelineShape shape{};
  if (parts == 1) {
    shape.parts = 1;
    shape.part_bytes = static_cast<uint32_t>(std::max(record_bytes, kRowAlignment));
  } else {
    const uint64_t bytes =
        quotient_up(quotient_up(record_bytes, parts), kPartAlignment) * kPartAlignment;
    shape.parts = static_cast<uint32_t>(quotient_up(record_bytes, bytes));
    shape.part_bytes = static_cast<uint32_t>(bytes);
  }
  shape.by_parts = FastDivider(static_cast<int32_t>(shape.parts));
  shape.last_part_bytes =
      static_cast<uint32_t>(record_bytes - uint64_t{shape.parts - 1} * shape.part_bytes);
  const uint64_t of_first = p.placement.pitch[0];
  shape.parts_of_first =
      static_cast<uint32_t>(of_first == record_bytes ? quotient_up(of_first, shape.part_bytes)
                                                     : of_first / shape.part_bytes);
  const auto fitting = static_cast<int32_t>(static_cast<uint64_t>(shared_bytes) /
                                            (shape.part_bytes + sizeof(BulkBarrier)));
  shape.warps =
      std::min(fitting / kMinStages,
               shape.part_bytes < kFewWarpsPartBytes
                   ? kMaxWarps
                   : static_cast<int32_t>(knob("MOE_EP_WARPS", kWarps)));
  const auto wanted = static_cast<int32_t>(
      quotient_up(knob("MOE_EP_KIB", kBytesInFlight / 1024) * 1024, static_cast<uint64_t>(shape.warps) * shape.part_bytes));
  shape.stages = std::min(std::clamp(wanted, kMinStages, kMaxStages), fitting / shape.warps);
  return shape;
}

// Deals the launch's items out.
void set_items(PipelineShape& shape, int32_t num_tokens, uint32_t ctas) {
  shape.num_items = static_cast<uint32_t>(num_tokens) * shape.parts;
  shape.share = Share(shape.num_items, ctas, static_cast<uint32_t>(shape.warps),
                      static_cast<uint32_t>(shape.stages));
}

bool picks_are_usual(const DispatchKernelParams& p) {
  return p.ids_are_vectors && p.workspace.top_k == UsualIds::kIds &&
         reinterpret_cast<uintptr_t>(p.topk_weights) % sizeof(uint4) == 0;
}

auto* kernel_for(const BulkDispatchParams& params) {
  constexpr int kMaxWords = kMaxEpSize / kWarpSize;
  const DispatchKernelParams& p = params.dispatch;
  const bool all_in_bulk = all_payloads_are_aligned(p);
  if (p.workspace.ep_size > kWarpSize) {
    return all_in_bulk ? &dispatch_bulk_kernel<kMaxWords, BulkInputs::kAllInBulk>
                       : &dispatch_bulk_kernel<kMaxWords, BulkInputs::kAny>;
  }
  if (!all_in_bulk) return &dispatch_bulk_kernel<1, BulkInputs::kAny>;
  return params.owners.are_even && picks_are_usual(p)
             ? &dispatch_bulk_kernel<1, BulkInputs::kUsual>
             : &dispatch_bulk_kernel<1, BulkInputs::kAllInBulk>;
}

}  // namespace

cudaError_t launch_dispatch_bulk(const DispatchKernelParams& p, const CudaContext& context) {
  int multiprocessors = 0;
  cudaError_t error = multiprocessors_to_fill(&multiprocessors);
  if (error != cudaSuccess) return error;

  // By tokens_per_rank and not by num_tokens: an SM more is needed for blank rows just as well.
  BulkDispatchParams params{
      .dispatch = p,
      .pipeline = {},
      .table = {},
      .owners = EvenOwners::of(p.partition, p.workspace.ep_size),
  };
  params.table = RouteTableShape::of(p.workspace.ep_size, p.tokens_per_rank);
  const int table_bytes = params.table.bytes(p.workspace.ep_size);
  params.pipeline = pipeline_shape(p, multiprocessors, kMaxSharedBytes - table_bytes);
  const int64_t items = static_cast<int64_t>(p.tokens_per_rank) * params.pipeline.parts;
  // The counter runs past the last item by what all warps ask for in vain.
  constexpr int64_t kMaxItems = std::numeric_limits<uint32_t>::max() / 2;
  if (items > kMaxItems) return cudaErrorInvalidValue;

  const int64_t ctas = std::clamp<int64_t>(items, 1, std::min<int64_t>(multiprocessors, 65535));
  set_items(params.pipeline, p.num_tokens, static_cast<uint32_t>(ctas));
  const LaunchShape shape{
      .ctas = static_cast<int>(ctas),
      .threads = kInPlaceThreads,
      .shared_bytes = std::max(params.pipeline.bytes() + table_bytes, kMinSharedBytes),
  };
  error = launch(kernel_for(params), shape, context, params);
  return error != cudaSuccess ? error : launch_copy_outputs(p, context);
}

}  // namespace moe_ep::cake
