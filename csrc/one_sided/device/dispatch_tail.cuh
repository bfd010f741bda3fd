// How a dispatch ends that has put rows in place: statistics, arrivals, the wait for the peers.
//
// A CTA's rows are in place once all its threads have stored them and met at a barrier; the release
// at system scope of the threads that signal hands this on to the peers.
#pragma once

#include <cstdint>

#include "core/device_signal.cuh"
#include "core/epoch.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/agreement.cuh"
#include "one_sided/device/bounded_wait.cuh"
#include "one_sided/device/picks.cuh"
#include "one_sided/device/prepare_combine.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::one_sided {

// To the peers' row of this rank. For `threads` threads of one CTA, before its arrival.
template <int kWords>
__device__ void send_stats(const DispatchKernelParams& p, const RankSet<kWords>& active,
                           uint32_t thread = threadIdx.x, uint32_t threads = blockDim.x) {
  if (p.eplb_local_stats == nullptr) return;
  for (int32_t rank = 0; rank < p.workspace.ep_size; ++rank) {
    if (!active.contains(rank)) continue;
    int32_t* const stats = DeviceSegment(p.workspace, rank).eplb_stats(p.workspace.ep_rank);
    for (int32_t i = thread; i < p.workspace.eplb_stats_num_experts; i += threads) {
      stats[i] = p.eplb_local_stats[i];
    }
  }
}

// The CTA's rows, ids, weights and statistics are in place at the peers: each thread knows of its
// own, and the barrier before this call of the others'. What the CTAs of a launch add sums to
// kArrivalsPerRound, whatever their number.
template <int kWords>
__device__ void signal_arrival(const DispatchKernelParams& p, const RankSet<kWords>& active) {
  const auto peer = static_cast<int32_t>(threadIdx.x);
  if (peer >= p.workspace.ep_size || !active.contains(peer)) return;
  signal_add(DeviceSegment(p.workspace, peer).dispatch_arrivals(p.workspace.ep_rank),
             blockIdx.x == 0 ? kArrivalsPerRound - (gridDim.x - 1) : 1, p.workspace.reach);
}

// Waits for a source's header and for all its rows. False: the wait has expired.
__device__ inline bool await_source(const DispatchKernelParams& p, int32_t source, uint32_t epoch,
                                    uint4& header) {
  const uint32_t* const arrivals = own_segment(p.workspace).dispatch_arrivals(source);
  Patience patience;
  for (;;) {
    header = load_header(p.workspace, source);
    const bool arrived = epoch_reached(poll(arrivals), epoch * kArrivalsPerRound);
    if (header.w == epoch && arrived) return true;
    const uint32_t seen = header.w == epoch ? epoch - 1 : header.w;
    if (patience.exhausted(p.workspace, Phase::kDispatch, source, epoch, seen)) return false;
  }
}

// A broken round has no rows: all ids are invalid and all counts 0, as far as this rank can tell.
__device__ inline void void_round(const DispatchKernelParams& p) {
  blank_ids(p, own_segment(p.workspace), 0,
            static_cast<int64_t>(p.workspace.ep_size) * p.tokens_per_rank, threadIdx.x, blockDim.x);
  if (threadIdx.x < kWarpSize) clear_recv_counts(p);
}

// The statistics that have come, for the user; zeros of the ranks that do not take part.
template <int kWords>
__device__ void deliver_stats(const DispatchKernelParams& p, const RankSet<kWords>& active) {
  if (p.out_eplb_stats == nullptr) return;
  const int32_t experts = p.workspace.eplb_stats_num_experts;
  for (int32_t source = 0; source < p.workspace.ep_size; ++source) {
    const int32_t* const from = own_segment(p.workspace).eplb_stats(source);
    int32_t* const to = p.out_eplb_stats + static_cast<int64_t>(source) * experts;
    const bool takes_part = active.contains(source);
    if (takes_part && from == to) continue;
    for (int32_t i = threadIdx.x; i < experts; i += blockDim.x) to[i] = takes_part ? from[i] : 0;
  }
}

// Waits for all sources and gives the user what they have sent besides rows. For CTA 0.
template <int kWords>
__device__ void receive(const DispatchKernelParams& p, const RankSet<kWords>& active,
                        uint32_t epoch) {
  const auto source = static_cast<int32_t>(threadIdx.x);
  const uint32_t signature = round_signature(p, active);
  uint4 header{};
  bool arrived = true;
  bool agrees = true;
  if (source < p.workspace.ep_size && active.contains(source)) {
    arrived = await_source(p, source, epoch, header);
    agrees = !arrived || header_agrees(p, header, signature);
  }
  if (source < p.workspace.ep_size) {
    const auto rows = static_cast<int32_t>(header.x);
    p.out_recv_counts[source] = rows;
    own_segment(p.workspace).recv_counts()[source] = rows;
  }
  // Behind the barrier all threads may read what the sources sent.
  const bool broken = __syncthreads_or(!arrived || !agrees);
  if (broken) {
    const bool failed = __syncthreads_or(!arrived);
    if (!failed && threadIdx.x < kWarpSize) {
      const RankSet<kWords> copy = active;  // the call takes an address
      settle_disagreement(p, copy, epoch);
    }
    __syncthreads();
  }
  allow_next_kernel();
  if (broken) void_round(p);
  deliver_stats(p, active);
}

}  // namespace moe_ep::one_sided
