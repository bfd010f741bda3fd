// The rows of dispatch, through the channels.
#pragma once

#include <cstdint>

#include "two_sided/cuda_params.h"
#include "two_sided/device/groups.cuh"
#include "two_sided/device/record_copies.cuh"
#include "two_sided/device/warp_machine.cuh"
#include "two_sided/roles/receive_slots.h"
#include "two_sided/roles/send_tokens.h"

namespace moe_ep::two_sided {

class AlltoallvWarp : public WarpMachine {
 public:
  __device__ AlltoallvWarp(const AlltoallvKernelParams& p, uint32_t epoch, RowList& row_list)
      : WarpMachine(p.workspace, Phase::kDispatch, epoch, row_list), p_(p) {}

  __device__ void send_record(const Item& item, int32_t token, uint8_t* const* rows, int32_t count,
                              int32_t own_row) const {
    // A token that is not one of this round must not lead out of the tensors.
    const int32_t given = min(max(token, 0), p_.num_tokens - 1);
    const int64_t first = first_row_from(p_.workspace.view.ep_rank);
    row_to_places(p_.given, given, p_.received, own_row < 0 ? -1 : first + own_row, item, rows,
                  count);
  }

  template <typename Free>
  __device__ void receive_slot(const Item& item, int32_t source, int32_t row, int32_t count,
                               const uint8_t* slot, const Free& free) const {
    slot_to_rows(slot, p_.received, item, first_row_from(source) + row, count, free);
  }

 private:
  __device__ int64_t first_row_from(int32_t source) const {
    return static_cast<int64_t>(source) * p_.tokens_per_rank;
  }

  const AlltoallvKernelParams& p_;
};

// Nobody may look at rows that did not all come.
__device__ inline void say_that_nothing_came(const AlltoallvKernelParams& p) {
  for (int32_t source = lane_id(); source < p.workspace.view.geometry.ep_size;
       source += kWarpSize) {
    p.recv_counts[source] = 0;
  }
}

template <int kWords>
__global__ void __launch_bounds__(kCtaThreads, kCtasPerSm)
    alltoallv_kernel(const __grid_constant__ AlltoallvKernelParams p) {
  __shared__ RowList row_lists[CtaShape::kWarps];
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
  AlltoallvWarp warp(p, round.epoch, row_lists[threadIdx.x / kWarpSize]);
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
