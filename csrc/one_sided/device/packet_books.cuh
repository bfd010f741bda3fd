// What two warps of a packet dispatch do for the whole grid: one announces the rows, the other
// waits for what the others announce, and does not come later because of what the first one does.
#pragma once

#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/agreement.cuh"
#include "one_sided/device/announcements.cuh"
#include "one_sided/device/bounded_wait.cuh"
#include "one_sided/device/packet_receive.cuh"
#include "one_sided/device/packet_round.cuh"
#include "one_sided/device/prepare_combine.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/workspace.cuh"

namespace moe_ep::one_sided {

// Of lane r, the tokens that go to rank 32 * w + r. Token by token or rank by rank, whichever is
// shorter; where there are more than 32 ranks there are fewer tokens.
template <int kWords>
__device__ int32_t rows_to_rank(const DispatchKernelParams& p, const Routes<kWords>& routes,
                                int w) {
  const int lane = lane_id();
  if (kWords == 1 && p.num_tokens > p.workspace.ep_size) {
    uint32_t tokens = 0;
#pragma unroll 4
    for (int32_t rank = 0; rank < p.workspace.ep_size; ++rank) {
      const uint32_t to_rank = routes.tokens_to(w, rank);
      if (lane == rank) tokens = to_rank;
    }
    return __popc(tokens);
  }
  int32_t rows = 0;
#pragma unroll 4
  for (int32_t token = 0; token < p.num_tokens; ++token) {
    rows += static_cast<int32_t>((routes.ranks_of(w, token) >> lane) & 1);
  }
  return rows;
}

// Tells every rank how many rows it gets. The first thing of a round that others wait for.
// header: of this rank at rank r, for lane r.
template <int kWords>
__device__ void announce_rows(const DispatchKernelParams& p, const Round<kWords>& round,
                              const Routes<kWords>& routes, RoundHeader* header) {
  const int lane = lane_id();
  const int32_t own = p.workspace.ep_rank;
  int32_t rows_to_self = 0;
#pragma unroll 1
  for (int w = 0; w < kWords; ++w) {
    const int32_t rows = rows_to_rank(p, routes, w);
    if (round.active.contains(w * kWarpSize + lane)) {
      send_header(p, header, rows, round.signature, round.epoch);
    }
    if (kWords > 1)
      header = DeviceSegment(p.workspace, (w + 1) * kWarpSize + lane).round_header(own);
    if (w == own / kWarpSize) rows_to_self = __shfl_sync(kAllLanes, rows, own % kWarpSize);
  }
  // Nobody waits for the arrivals of this round; they keep the words in step with the epoch.
#pragma unroll 1
  for (int32_t rank = lane; rank < p.workspace.ep_size; rank += kWarpSize) {
    if (!round.active.contains(rank)) continue;
    atomicAdd_system(DeviceSegment(p.workspace, rank).dispatch_arrivals(own), kArrivalsPerRound);
  }
#pragma unroll 1
  for (int32_t row = rows_to_self; row < p.tokens_per_rank; ++row) {
    clear_row(p, static_cast<int64_t>(own) * p.tokens_per_rank + row);
  }
}

// Leaves combine what it needs, waits for the headers of all ranks, writes the counts, and settles
// a disagreement.
template <int kWords>
__device__ void keep_counts(const DispatchKernelParams& p, const Round<kWords>& round) {
  prepare_combine(p, round.active, round.epoch, static_cast<uint32_t>(lane_id()));
  Announcements<kWords> sources(p, round, false);
  int32_t* const own_counts = own_segment(p.workspace).recv_counts();
  bool agreed = true;
#pragma unroll 1
  for (int32_t first = 0; first < p.workspace.ep_size; first += kWarpSize) {
    sources.look_at(first);
    Patience patience;
    while (!sources.knows_window()) {
      const uint4 header = sources.load();
      sources.take(header);
      if (sources.knows_window()) break;
      if (sources.expired(patience, sources.first_missing(), header)) break;
    }
    const int32_t source = first + lane_id();
    if (source >= p.workspace.ep_size) continue;
    const int32_t rows = sources.rows();
    agreed &= rows >= 0 || !round.active.contains(source);
    p.out_recv_counts[source] = max(rows, 0);
    own_counts[source] = max(rows, 0);
  }
  __syncwarp();
  if (sources.abandoned()) {
    clear_recv_counts(p);
  } else if (!__all_sync(kAllLanes, agreed)) {
    const RankSet<kWords> active = round.active;  // a copy: the call takes an address
    settle_disagreement(p, active, round.epoch);
  }
}

// After a failure: nothing is sent and nothing has come.
__device__ inline void keep_nothing(const DispatchKernelParams& p) {
  clear_recv_counts(p);
#pragma unroll 1
  for (int32_t row = 0; row < p.tokens_per_rank; ++row) {
    clear_row(p, static_cast<int64_t>(p.workspace.ep_rank) * p.tokens_per_rank + row);
  }
}

}  // namespace moe_ep::one_sided
