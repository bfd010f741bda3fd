#include "cake/dispatch_packets.h"

#include <algorithm>

#include "cake/cuda_launch.h"
#include "cake/dispatch_packets.cuh"

namespace moe_ep::cake {
namespace {

using Kernel = void (*)(PacketDispatchParams);

Kernel kernel_for(const PacketDispatchParams& params) {
  const bool whole = params.parts.are_whole;
  if (params.dispatch.workspace.ep_size <= kWarpSize) {
    return whole ? dispatch_packets<1, true> : dispatch_packets<1, false>;
  }
  return whole ? dispatch_packets<8, true> : dispatch_packets<8, false>;
}

// The tasks of a rank that has all its tokens: grids are sized by what the ranks share.
int64_t tasks_of(const PacketDispatchParams& params) {
  const int64_t ranks = params.dispatch.workspace.ep_size;
  return ranks * (static_cast<int64_t>(params.dispatch.tokens_per_rank) * params.record.pieces +
                  params.stats.pieces);
}

}  // namespace

cudaError_t launch_dispatch_packets(const DispatchKernelParams& p, const CudaContext& context) {
  const RecordShape record = RecordShape::of(p.num_chunks);
  const RecordShape stats = p.eplb_local_stats == nullptr
                                ? RecordShape{}
                                : RecordShape::of(static_cast<int32_t>(PacketSlots::chunks_of_words(
                                      static_cast<uint64_t>(p.workspace.eplb_stats_num_experts))));
  PacketDispatchParams params{
      .dispatch = p,
      .parts = RecordParts::of(p),
      .record = record,
      .stats = stats,
      .by_record_pieces = FastDivider(record.pieces),
      .by_stats_pieces = FastDivider(std::max(stats.pieces, 1)),
      .by_tokens_per_rank = FastDivider(std::max(p.tokens_per_rank, 1)),
  };
  if (p.num_tokens == 0) {  // every warp loads ids before it looks at anything: give it some
    const DeviceWorkspace& w = p.workspace;
    params.dispatch.topk_ids = w.base + w.ep_rank * w.rank_stride + w.layout.topk_ids.offset;
  }
  const int64_t tasks = tasks_of(params);
  // Not reached: the path is for few tokens, and the workspace of such records has no room.
  if (p.tokens_per_rank > kMaxPacketTokens || tasks > INT32_MAX / 2) return cudaErrorInvalidValue;

  const Kernel kernel = kernel_for(params);
  int multiprocessors = 0;
  const cudaError_t error = multiprocessor_count(&multiprocessors);
  if (error != cudaSuccess) return error;
  constexpr int64_t kWarps = kPacketCtaThreads / kWarpSize;
  // Under MPS the count is the rank's share. Two CTAs on each multiprocessor leave room for the
  // grids of the other ranks on a GPU and for the kernel behind this one. To be measured: CTAs of
  // 256 threads from 16 tokens on.
  const int64_t most = int64_t{multiprocessors} * kPacketCtasPerSm;
  const int64_t wanted = (1 + tasks + kWarps - 1) / kWarps;  // and a warp that keeps the books
  const LaunchShape shape{
      .ctas = static_cast<int>(std::max<int64_t>(std::min(most, wanted), 1)),
      .threads = kPacketCtaThreads,
      .shared_bytes = 0,
  };
  return launch(kernel, shape, context, params);
}

}  // namespace moe_ep::cake
