// What check() asks the other ranks, by a kernel: their memory is for kernels alone.
#include "one_sided/cuda.h"
#include "one_sided/cuda_launch.h"
#include "one_sided/device/rows_read.cuh"

namespace moe_ep::one_sided {
namespace {

// Thread r looks at rank r. Behind this rank's last combine: what a rank notes later concerns it no
// more.
__global__ void look_around_kernel(const __grid_constant__ DeviceWorkspace workspace) {
  const auto peer = static_cast<int32_t>(threadIdx.x);
  if (peer >= workspace.ep_size || peer == workspace.ep_rank) return;
  const DeviceState* const own = own_segment(workspace).state();
  if (!own->last_active.contains(peer) || !was_left_reading(workspace, peer)) return;
  const uint32_t epoch = own->dispatch_epoch;
  record_missed(workspace, Missed::kWentOn, Phase::kCombine, peer, epoch, epoch + 1);
}

}  // namespace

cudaError_t launch_look_around(const WorkspaceView& workspace, StatusPage* page,
                               cudaStream_t stream) {
  const DeviceWorkspace params = device_workspace(workspace, 0, {stream, page, nullptr, false});
  look_around_kernel<<<1, kMaxEpSize, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace moe_ep::one_sided
