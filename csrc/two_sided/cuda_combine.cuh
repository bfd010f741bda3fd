// The rows of the experts on their way back through the channels, and their sums.
#pragma once

#include <cstdint>

#include "transport/device/disagreement.cuh"
#include "two_sided/cuda_params.h"
#include "two_sided/device/groups.cuh"
#include "two_sided/device/part_sums.cuh"
#include "two_sided/device/stage.cuh"
#include "two_sided/device/warp_machine.cuh"
#include "two_sided/roles/send_rows.h"
#include "two_sided/roles/sum_tokens.h"

namespace moe_ep::two_sided {

template <RowType kType>
class CombineWarp : public WarpMachine {
 public:
  __device__ CombineWarp(const CombineKernelParams& p, uint32_t epoch, WarpMemory& memory)
      : WarpMachine(p.workspace, Phase::kCombine, epoch, memory.row_list),
        p_(p),
        stage_(memory.stage) {}

  __device__ void load_rows(const Item& item, int32_t source, int32_t row, int32_t count) const {
    stage_.load(rows_of(item, source, row, count));
  }
  __device__ void store_rows(const Item& item, int32_t source, int32_t row, int32_t count,
                             uint8_t* slot) const {
    const Parts<FieldRows> parts = rows_of(item, source, row, count);
    stage_.wait();
    stage_.store_slot(slot, parts.chunks());
    for_each_further_window(parts.chunks(), [&](int32_t begin) {
      stage_.load(parts, begin);
      stage_.wait();
      stage_.store_slot(slot, parts.chunks(), begin);
    });
  }

  __device__ const uint8_t* own_row(const Item& item, int32_t row) const {
    return place_in(p_.expert_rows, received_row(p_.workspace.view.ep_rank, row), item.begin)
        .address;
  }

  template <typename Free>
  __device__ void sum_rows(const Item& item, int32_t token, uint8_t* const* rows, int32_t count,
                           const Free& free) const {
    const PartOfSum part(p_, item, token);
    if (p_.expert_rows.is_whole) {
      sum_whole_part<kType>(part, rows, count, stage_.mine(), free);
    } else {
      sum_part<kType>(part, rows, count, free);
    }
  }
  __device__ void poison(const Item& item, int32_t token) const {
    poison_part<kType>(PartOfSum(p_, item, token));
  }

 private:
  __device__ int64_t received_row(int32_t source, int32_t row) const {
    return static_cast<int64_t>(source) * p_.tokens_per_rank + row;
  }

  __device__ Parts<FieldRows> rows_of(const Item& item, int32_t source, int32_t row,
                                      int32_t count) const {
    return {p_.expert_rows, item, received_row(source, row), count};
  }

  const CombineKernelParams& p_;
  Stage stage_;
};

// By one warp of CTA 0: this rank's alltoallv is over, so that it takes rows of experts from now
// on.
__device__ inline void set_flags(const CombineKernelParams& p, uint32_t epoch, uint32_t signature) {
  const WorkspaceView& view = p.workspace.view;
  for (int32_t source = lane_id(); source < view.geometry.ep_size; source += kWarpSize) {
    signal_store(&p.workspace.at(source).combine_flag(view.ep_rank), epoch, signature,
                 p.workspace.reach);
  }
}

// By one warp. False: some rank was called with something else, or the wait has expired; the host
// is told. Not of the former in a round in which the ranks disagreed in prepare.
__device__ inline bool await_flags(const CombineKernelParams& p, uint32_t epoch, bool is_poisoned) {
  const Segment own = p.workspace.own();
  bool agree = true;
  for (int32_t owner = lane_id(); owner < p.workspace.view.geometry.ep_size; owner += kWarpSize) {
    Patience patience;
    for (;;) {
      const Pair seen = poll_pair(&own.combine_flag(owner));
      if (epoch_reached(seen.low, epoch)) {
        const bool same = seen.low == epoch && seen.high == p.signature;
        agree = agree && same;
        if (!same && !is_poisoned && blockIdx.x == 0) record_combine_disagreement(p.workspace.page);
        break;
      }
      if (patience.exhausted(p.workspace, Phase::kCombine, owner, epoch, seen.low)) return false;
    }
  }
  return agree;
}

// By all threads of a CTA: whether sums may be formed.
__device__ inline bool meet(const CombineKernelParams& p, const DeviceRound& round) {
  // A call with other sizes has no rows to offer, and says so by a signature that is nobody's.
  const bool is_of_this_round =
      round.num_tokens == p.num_tokens && round.tokens_per_rank == p.tokens_per_rank;
  const uint32_t signature = is_of_this_round ? p.signature : ~p.signature;
  bool valid = is_of_this_round && round.poisoned == 0;
  if (threadIdx.x < kWarpSize) {
    const bool failed = has_failed(p.workspace);
    if (blockIdx.x == 0 && !failed) set_flags(p, round.epoch, signature);
    valid = !failed && await_flags(p, round.epoch, round.poisoned != 0) && valid;
  }
  return __syncthreads_and(valid) != 0;
}

template <RowType kType, int kWords>
__global__ void __launch_bounds__(kCtaThreads, kCtasPerSm<kWords>)
    combine_kernel(const __grid_constant__ CombineKernelParams p) {
  __shared__ WarpMemory memory[CtaShape::kWarps];
  DeviceRound& round = p.workspace.own().device_round();
  const bool valid = meet(p, round);
  CombineWarp<kType> warp(p, round.epoch, memory[threadIdx.x / kWarpSize]);
  using Summer = TokenSummer<CombineWarp<kType>, kWords>;
  Groups groups(&round.combine_groups, p.plan, p.shape);
  for (int32_t group; groups.take(&group);) {
    const Duty duty(p.shape, group);
    if (duty.channel >= p.plan.busy_channels()) continue;
    const Channel channel{p.workspace.view, p.workspace.layout, p.plan, p.send_tokens,
                          duty.channel};
    if (duty.peer_warp < 0) {
      Summer summer(warp, channel, p.num_tokens);
      if (valid) {
        summer.run();
      } else {
        summer.poison_all();
      }
    } else if (valid) {
      RowSender<CombineWarp<kType>, kWords>(warp, channel, p.shape, duty.peer_warp).run();
    }
  }
}

}  // namespace moe_ep::two_sided
