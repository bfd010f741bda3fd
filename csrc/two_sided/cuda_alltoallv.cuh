// The rows of dispatch, through the channels.
#pragma once

#include <cstdint>

#include "transport/device/memory_access.cuh"
#include "two_sided/cuda_params.h"
#include "two_sided/device/groups.cuh"
#include "two_sided/device/stage.cuh"
#include "two_sided/device/warp_machine.cuh"
#include "two_sided/roles/receive_slots.h"
#include "two_sided/roles/send_tokens.h"

namespace moe_ep::two_sided {

class AlltoallvWarp : public WarpMachine {
 public:
  __device__ AlltoallvWarp(const AlltoallvKernelParams& p, uint32_t epoch, WarpMemory& memory)
      : WarpMachine(p.workspace, Phase::kDispatch, epoch, memory.row_list),
        p_(p),
        stage_(memory.stage) {}

  __device__ void load_record(const Item& item, int32_t token) const {
    stage_.load(given(item, token));
  }
  __device__ void store_record(const Item& item, int32_t token, uint8_t* const* places,
                               int32_t count, int32_t own_row) const {
    store_window(item, places, count, own_row, 0);
    for_each_further_window(item.chunks, [&](int32_t begin) {
      stage_.load(given(item, token), begin);
      store_window(item, places, count, own_row, begin);
    });
  }

  template <typename Free>
  __device__ void receive_slot(const Item& item, int32_t source, int32_t row, int32_t count,
                               const uint8_t* slot, const Free& free) const {
    const Parts<RecordRows> parts{p_.received, item, first_row_from(source) + row, count};
    const auto move = [&](int32_t begin) {
      stage_.load_slot(slot, parts.chunks(), begin);
      stage_.wait();
      if (begin + kStageChunks >= parts.chunks()) free();
      stage_.store(parts, begin);
    };
    move(0);
    for_each_further_window(parts.chunks(), move);
  }

 private:
  // A part of a token's record.
  __device__ Parts<RecordRows> given(const Item& item, int32_t token) const {
    return {p_.given, item, given_row(token), 1};
  }
  // What is in the stage.
  __device__ void store_window(const Item& item, uint8_t* const* places, int32_t count,
                               int32_t own_row, int32_t begin) const {
    stage_.wait();
#pragma unroll 1
    for (int32_t j = 0; j < count; ++j) stage_.store_slot(places[j], item.chunks, begin);
    if (own_row < 0) return;
    const int64_t row = first_row_from(p_.workspace.view.ep_rank) + own_row;
    stage_.store(Parts<RecordRows>{p_.received, item, row, 1}, begin);
  }
  // A token that is not one of this round must not lead out of the tensors.
  __device__ int32_t given_row(int32_t token) const {
    return min(max(token, 0), p_.num_tokens - 1);
  }
  __device__ int64_t first_row_from(int32_t source) const {
    return static_cast<int64_t>(source) * p_.tokens_per_rank;
  }

  const AlltoallvKernelParams& p_;
  Stage stage_;
};

// Nobody may look at rows that did not all come.
__device__ inline void say_that_nothing_came(const AlltoallvKernelParams& p) {
  for (int32_t source = lane_id(); source < p.workspace.view.geometry.ep_size;
       source += kWarpSize) {
    p.recv_counts[source] = 0;
  }
}

template <int kWords>
__global__ void __launch_bounds__(kCtaThreads, kCtasPerSm<kWords>)
    alltoallv_kernel(const __grid_constant__ AlltoallvKernelParams p) {
  __shared__ WarpMemory memory[CtaShape::kWarps];
  wait_for_previous_kernel();
  DeviceRound& round = p.workspace.own().device_round();
  const bool is_of_this_round = round.num_tokens == p.num_tokens &&
                                round.tokens_per_rank == p.tokens_per_rank &&
                                round.fields == p.fields;
  const bool has_rows = is_of_this_round && round.poisoned == 0;
  // Another CTA may fail at this moment.
  if (__syncthreads_or(!has_rows || has_failed(p.workspace)) != 0) {
    if (threadIdx.x < kWarpSize) say_that_nothing_came(p);
    return;
  }
  AlltoallvWarp warp(p, round.epoch, memory[threadIdx.x / kWarpSize]);
  Groups groups(&round.dispatch_groups, p.plan, p.shape);
  for (int32_t group; groups.take(&group);) {
    const Duty duty(p.shape, group);
    if (duty.channel >= p.plan.busy_channels()) continue;
    const Channel channel{p.workspace.view, p.workspace.layout, p.plan, p.send_tokens,
                          duty.channel};
    const bool is_done =
        duty.peer_warp < 0
            ? TokenSender<AlltoallvWarp, kWords>(warp, channel).run()
            : SlotReceiver<AlltoallvWarp, kWords>(warp, channel, p.shape, duty.peer_warp).run();
    if (!is_done) say_that_nothing_came(p);
  }
}

}  // namespace moe_ep::two_sided
