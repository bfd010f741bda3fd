// Combine for a few tokens: the owner of a row stores it to its source, as packets that say
// themselves that they have come. One hop and no fence between the row and its sum.
//
// A warp first does its share of the sends, which never wait, then its share of the sums. One warp
// exchanges the flags of combine_enter.cuh, which other combines begin with. Here they are not in
// front of the rows; but a sum needs to see them, since a flag says that the owner was called with
// the same type and width, and the grid ends only when all have come, since a flag also says that
// what this rank sent in dispatch is consumed.
//
// Packet slots of owner p are written by p in its combine and read here in ours. They are written
// again in p's next combine, behind its next dispatch, which waits for this rank's, which follows
// this kernel.
//
// As in a packet dispatch, warps wait for sends that are dealt to all CTAs of a peer, so all of
// these must get to run beside what waits: grids are small, see there and in the launcher.
#pragma once

#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/combine_enter.cuh"
#include "one_sided/device/packets.cuh"
#include "one_sided/device/push_receive.cuh"
#include "one_sided/device/push_round.cuh"
#include "one_sided/device/push_send.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/rows_read.cuh"
#include "one_sided/device/token_rows.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"
#include "transport/device/schedule.cuh"

namespace moe_ep::one_sided {

inline constexpr int kPushThreads = 128;
inline constexpr uint32_t kPushWarps = kPushThreads / kWarpSize;
// At most, see the launcher; 2 against 3 is to be measured. Registers for as many again.
inline constexpr int kPushCtasPerSm = 2;
inline constexpr int kPushResidentCtas = 2 * kPushCtasPerSm;

// Of the warps that send and sum, which are all but the first of CTA 0. Neighbours are on different
// SMs. The other warps of CTA 0 come last: they most likely sum, and no stores over the link hold
// up the fence in front of the flags.
__device__ inline int32_t push_rank_of_warp() {
  const auto warp = static_cast<int32_t>(threadIdx.x / kWarpSize);
  const auto ctas = static_cast<int32_t>(gridDim.x) - 1;
  const auto cta = static_cast<int32_t>(blockIdx.x) - 1;
  return cta < 0 ? static_cast<int32_t>(kPushWarps) * ctas + warp - 1 : warp * ctas + cta;
}

// Sums this warp's share: tasks task, task + step, ...; `places` and `slot` are the first of it, if
// there is any. valid: whether sums may be formed; if not they are NaN. A warp without a sum does
// not give leave to the next kernel: it has waited for nothing.
template <RowType kType>
__device__ void sum_share(const PushCombine& c, uint32_t epoch, bool valid, PushedPlaces places,
                          SendSlot slot, int32_t task, int32_t step, uint4* scratch) {
  const int32_t receives = c.receives();
#pragma unroll 1
  for (; task < receives; task += step) {
    PushedRows rows(c.combine, slot);
    PushedSum<kType> sum(valid);
#pragma unroll 1
    for (int32_t first = 0; valid && first < rows.count; first += kRowsAtOnce) {
      ThreadPackets packets[kRowsAtOnce];
      if (!rows.arrive(c, places.packet, epoch, first, packets)) {
        sum = PushedSum<kType>(false);
        valid = !__any_sync(kAllLanes, has_failed(c.combine.workspace));
        break;
      }
#pragma unroll
      for (int k = 0; k < kRowsAtOnce; ++k) {
        if (first + k < rows.count) sum.add(packets[k].words());
      }
    }
    const bool is_last = task + step >= receives;
    if (is_last) allow_next_kernel();
    sum.store(c, PushedPiece::of(c, task), scratch);
    if (is_last) return;
    places = PushedPlaces::of(c, task + step);
    slot = load_slot(c.combine, places.slots);
  }
}

template <RowType kType>
__global__ void __launch_bounds__(kPushThreads, kPushResidentCtas)
    combine_push_kernel(const __grid_constant__ PushCombine c) {
  __shared__ uint4 scratch[kPushThreads];
  const CombineKernelParams& p = c.combine;
  if (blockIdx.x == 0 && threadIdx.x < kWarpSize) {
    const PeerAddresses peers(p);
    wait_for_previous_kernel_knowing(peers.state, peers.flag_there, peers.flag_here);
    if (lane_id() == 0) tell_nothing_to_read(p);
    exchange_flags(p, c.reads_come_first ? FlagsAreSet::kLater : FlagsAreSet::kWithoutFence);
    allow_next_kernel();
    return;
  }

  // Addresses are worked out before the wait.
  const DeviceState* const state = own_segment(p.workspace).state();
  const auto warps = static_cast<int32_t>(gridDim.x * kPushWarps) - 1;
  const int32_t sends = c.sends();
  int32_t task = push_rank_of_warp();
  const bool pushes = task < sends;
  PushJob job{};
  PushedPlaces places{};
  if (pushes) {
    job = PushJob::of(c, task);
  } else {
    places = PushedPlaces::of(c, task - sends);
  }
  wait_for_previous_kernel_knowing(state, job.count, job.packets, job.chunks[0], job.chunks[1],
                                   job.chunks[2], places.slots);

  // State, count and the first piece of a row fly together: nothing here looks at what it loads.
  const CombineRound round(p, state);
  int32_t count = 0;
  ThreadWords words;
  SendSlot slot{-1, 0};
  if (pushes) {
    count = *job.count;
    words = job.load(c);
  } else if (task - sends < c.receives()) {
    slot = load_slot(p, places.slots);
  }
  const bool failed = __any_sync(kAllLanes, round.failed());  // it may be set at this moment
  bool valid = !failed && !round.poisoned() && !round.misused();
  task = pushes ? push_share(c, round, valid, job, count, words, task, warps) : task - sends;
  if (pushes && task < c.receives()) {
    places = PushedPlaces::of(c, task);
    slot = load_slot(p, places.slots);
  }
  if (c.reads_come_first) {
    if (!failed) publish_when_read(p, round, static_cast<uint32_t>(warps));
    if (valid && task < c.receives()) {
      valid =
          __all_sync(kAllLanes, await_rows(p, round, p.workspace.ep_rank,
                                           flag_at(p, p.workspace.ep_rank, p.workspace.ep_rank)));
    }
  }
  sum_share<kType>(c, round.epoch(), valid, places, slot, task, warps,
                   scratch + threadIdx.x / kWarpSize * kWarpSize);
}

}  // namespace moe_ep::one_sided
