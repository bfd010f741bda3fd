// The Machine of roles/channel.h: a warp of a CUDA kernel.
#pragma once

#include <cstdint>

#include "core/device_signal.cuh"
#include "transport/device/bounded_wait.cuh"
#include "transport/device/warp.cuh"
#include "two_sided/cuda_params.h"
#include "two_sided/device/stage.cuh"

namespace moe_ep::two_sided {

// Places in rows of a token's ranks.
using RowList = uint8_t* [kMaxTopK];

// In shared memory, of each warp.
struct WarpMemory {
  alignas(128) uint4 stage[kStageChunks];
  RowList row_list;
};

class WarpMachine {
 public:
  static constexpr int32_t kLanes = kWarpSize;

  __device__ WarpMachine(const DeviceWorkspace& workspace, Phase phase, uint32_t epoch,
                         RowList& row_list)
      : workspace_(workspace), phase_(phase), epoch_(epoch), row_list_(row_list) {}

  __device__ static int32_t lane() { return lane_id(); }
  __device__ static uint32_t ballot(bool says) { return __ballot_sync(kAllLanes, says); }
  template <typename Value>
  __device__ static Value from_lane(Value value, int32_t lane) {
    return __shfl_sync(kAllLanes, value, lane);
  }
  __device__ static int32_t least(int32_t value) { return __reduce_min_sync(kAllLanes, value); }
  __device__ static int32_t lowest(uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }
  __device__ static int32_t count(uint32_t bits) { return __popc(bits); }
  __device__ static void sync() { __syncwarp(); }
  __device__ static uint32_t poll(const uint32_t* word) { return moe_ep::poll(word); }
  __device__ static uint32_t peek(const uint32_t* word) { return moe_ep::peek(word); }
  __device__ void fence() const { release_fence(workspace_.reach); }
  __device__ static void post(uint32_t* word, uint32_t value) { store_after_fence(word, value); }
  __device__ static void drop_load() { wait_for_loads(); }
  __device__ uint8_t** row_list() const { return row_list_; }

  __device__ void moved() { patience_ = Patience(); }
  __device__ bool counts_to_look() { return patience_.counts_to_look(); }
  // Of a peer that has announced its rows.
  __device__ bool has_run_out(int32_t peer) {
    const bool now = lane() == 0 && patience_.has_run_out(workspace_, phase_, peer, epoch_, epoch_);
    return from_lane(static_cast<int>(now), 0) != 0;
  }

 private:
  const DeviceWorkspace& workspace_;
  Phase phase_;
  uint32_t epoch_;
  RowList& row_list_;
  Patience patience_;
};

}  // namespace moe_ep::two_sided
