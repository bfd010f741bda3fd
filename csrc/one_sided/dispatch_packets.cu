#include "one_sided/dispatch_packets.h"

#include <algorithm>
#include <cstdint>

#include "one_sided/cuda_launch.h"
#include "one_sided/dispatch_packets.cuh"

namespace moe_ep::one_sided {
namespace {

using Kernel = void (*)(PacketDispatchParams);

template <int kWords>
Kernel kernel_for_inputs(PacketInputs inputs) {
  return inputs == PacketInputs::kAny ? dispatch_packets<kWords, PacketInputs::kAny>
                                      : dispatch_packets<kWords, PacketInputs::kWhole>;
}

Kernel kernel_for(PacketInputs inputs, int32_t ep_size) {
  if (inputs == PacketInputs::kUsual) return dispatch_packets<1, PacketInputs::kUsual>;
  return ep_size <= kWarpSize ? kernel_for_inputs<1>(inputs)
                              : kernel_for_inputs<kMaxEpSize / kWarpSize>(inputs);
}

// The tasks of a rank that has all its tokens: grids are sized by what the ranks share.
int64_t tasks_of(const PacketDispatchParams& params) {
  const int64_t ranks = params.dispatch.workspace.ep_size;
  return ranks * (static_cast<int64_t>(params.dispatch.tokens_per_rank) * params.record.pieces +
                  params.stats.pieces);
}

}  // namespace

cudaError_t launch_dispatch_packets(const DispatchKernelParams& p, const CudaContext& context) {
  PacketDispatchParams params = PacketDispatchParams::of(p);
  if (p.num_tokens == 0) {  // every warp loads ids before it looks at anything: give it some
    const DeviceWorkspace& w = p.workspace;
    params.dispatch.topk_ids = w.base + w.ep_rank * w.rank_stride + w.layout.topk_ids.offset;
  }
  const int64_t tasks = tasks_of(params);
  // Not reached: the path is for few tokens, and no machine has room for such records.
  if (p.tokens_per_rank > kMaxPacketTokens || tasks > INT32_MAX / 2 ||
      params.record.threads > RecordShape::kMaxThreads) {
    return cudaErrorInvalidValue;
  }

  int multiprocessors = 0;
  const cudaError_t error = multiprocessors_to_fill(&multiprocessors);
  if (error != cudaSuccess) return error;
  // So many CTAs on each multiprocessor leave room for the grids of the other ranks on a GPU and
  // for the kernel behind this one.
  const PacketInputs inputs = params.inputs();
  const int per_sm = inputs == PacketInputs::kUsual ? kPacketCtasPerSm<PacketInputs::kUsual>
                                                    : kPacketCtasPerSm<PacketInputs::kAny>;
  constexpr int64_t kWarps = kPacketThreads / kWarpSize;
  const int64_t wanted = (kBookWarps + tasks + kWarps - 1) / kWarps;
  const int64_t most = int64_t{multiprocessors} * per_sm;
  const LaunchShape shape{
      .ctas = static_cast<int>(std::max<int64_t>(std::min(most, wanted), 1)),
      .threads = kPacketThreads,
      .shared_bytes = 0,
  };
  return launch(kernel_for(inputs, p.workspace.ep_size), shape, context, params);
}

}  // namespace moe_ep::one_sided
