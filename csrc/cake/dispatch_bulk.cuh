// Dispatch of many tokens: rows go straight to their place at the receiver, in bulk copies.
//
// A rank's CTAs share nothing but a counter of items. Each CTA that has sent its items adds to the
// arrival word at every peer; CTA 0 alone waits for the peers, once its own part is done. So CTAs
// of a grid, and grids of ranks that share a GPU, need not run together.
//
// Order: bulk stores are complete for the thread that issued them after its bulk_wait; a CTA
// barrier hands that on to the threads that signal, and the release at system scope to the peers.
#pragma once

#include <cstdint>

#include "cake/cuda_params.h"
#include "cake/device/agreement.cuh"
#include "cake/device/bounded_wait.cuh"
#include "cake/device/destinations.cuh"
#include "cake/device/dispatch_tail.cuh"
#include "cake/device/memory_access.cuh"
#include "cake/device/picks.cuh"
#include "cake/device/route_table.cuh"
#include "cake/device/routing.cuh"
#include "cake/device/row_pipeline.cuh"
#include "cake/device/workspace.cuh"

namespace moe_ep::cake {

inline constexpr int kBulkDispatchThreads = 512;  // all build the table; some warps send
static_assert(kBulkDispatchThreads >= kMaxEpSize, "a thread a rank");

struct BulkDispatchParams {
  DispatchKernelParams dispatch;
  PipelineShape pipeline;
  RouteTableShape table;
  EvenOwners owners;
  bool ids_are_usual;  // eight int32 a token, aligned; all ranks own the same number of experts
};

// Sends the parts at hand while they are of tokens before `end`, whose rows the table knows.
template <int kWords, bool kAllInBulk>
__device__ void send_rows(const DispatchKernelParams& p, const RankSet<kWords>& active,
                          const RouteTable<kWords>& table, RowPipeline<kAllInBulk>& pipeline,
                          int64_t end) {
  const int64_t own_block = static_cast<int64_t>(p.workspace.ep_rank) * p.tokens_per_rank;
  for (;;) {
    const uint32_t item = pipeline.item();
    if (item == kNoItem) return;
    const int32_t token = pipeline.token_of(item);
    if (token >= end) return;
    const uint32_t part = pipeline.part_of(item);
    Place places[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) places[w] = table.place(token, w * kWarpSize + lane_id());
    Pick pick{};
    if (part == 0) pick = load_pick(p, token);  // meanwhile the row arrives
    pipeline.await();
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (!places[w].sent) continue;
      const DeviceSegment segment(p.workspace, w * kWarpSize + lane_id());
      pipeline.send(part, segment, own_block + places[w].row);
    }
    pipeline.end_sends();
    if (part == 0) {
      send_picks(p, active, places, token, pick);
      write_send_slots(p, places, token);
    }
    pipeline.advance();
  }
}

// What the peers and combine get to know besides rows. For CTA 0 and its last warps, which are the
// last to have rows: so no row waits for it.
template <int kWords>
__device__ void announce(const DispatchKernelParams& p, const RankSet<kWords>& active,
                         const RouteTable<kWords>& table, uint32_t epoch) {
  constexpr uint32_t kThreads = kBulkDispatchThreads / 2;
  static_assert(kThreads >= kMaxEpSize, "a thread a rank");
  if (threadIdx.x < kBulkDispatchThreads - kThreads) return;
  const uint32_t thread = threadIdx.x - (kBulkDispatchThreads - kThreads);
  const auto peer = static_cast<int32_t>(thread);
  if (peer < p.workspace.ep_size && active.contains(peer)) {
    send_header(p, peer, table.total(peer), round_signature(p, active), epoch);
  }
  prepare_combine(p, active, epoch, thread);
  send_stats(p, active, thread, kThreads);
}

// At most 128 registers a thread, so that 512 fit; one CTA a multiprocessor.
template <int kWords, bool kAllInBulk>
__global__ void __launch_bounds__(kBulkDispatchThreads, 1)
    dispatch_bulk_kernel(const __grid_constant__ BulkDispatchParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  const DispatchKernelParams& p = params.dispatch;
  RowPipeline<kAllInBulk> pipeline(p, params.pipeline, shared);
  RouteTable<kWords> table(p, params.table, shared + params.pipeline.bytes());
  const bool leads = blockIdx.x == 0;

  wait_for_previous_kernel();
  pipeline.reserve();
  const bool failed = has_failed(p.workspace);
  const uint32_t epoch = own_segment(p.workspace).state()->dispatch_epoch + 1;
  const RankSet<kWords> active = active_ranks<kWords>(p.workspace, p.active);

  for (int64_t first = 0;;) {
    const int64_t end = first + params.table.tokens;
    const bool is_last = end >= p.num_tokens;
    // First the ids are asked for, then rows: a burst of rows would hold the ids up. Rows that the
    // lanes copy themselves come after the scan: they keep the lanes busy.
    constexpr int kLoads = kWords > 1 ? 1 : 8;  // what the registers have room for
    const auto fill = [&] {
      if (first == 0) pipeline.fill();
    };
    if constexpr (kAllInBulk && kWords == 1) {
      if (params.ids_are_usual) {
        table.scan_usual(params.owners, active, static_cast<int32_t>(first), fill);
      } else {
        table.template scan<kLoads>(active, static_cast<int32_t>(first), fill);
      }
    } else if constexpr (kAllInBulk) {
      table.template scan<kLoads>(active, static_cast<int32_t>(first), fill);
    } else {
      table.template scan<kLoads>(active, static_cast<int32_t>(first), [] {});
      fill();
    }
    // Threads may differ in what they saw of a failure; behind the barrier they agree.
    if (__syncthreads_or(failed)) {
      if (first == 0) pipeline.drain();
      if (leads) void_round(p);
      return;
    }
    table.count_rows();
    const bool has_items = pipeline.item() != kNoItem;
    if (!__syncthreads_or(has_items || leads)) break;  // started late: the others did it all
    if (first == 0) pipeline.top_up();
    if (leads && is_last) announce(p, active, table, epoch);
    send_rows(p, active, table, pipeline, end);
    if (is_last) break;
    first = end;
    __syncthreads();  // the table is read no more
  }

  blank_rows_without_token(p, active);
  bulk_wait<0>();
  __syncthreads();
  signal_arrival(p, active);
  if (leads) receive(p, active, epoch);
}

}  // namespace moe_ep::cake
