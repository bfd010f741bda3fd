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
#include "cake/device/memory_access.cuh"
#include "cake/device/picks.cuh"
#include "cake/device/route_table.cuh"
#include "cake/device/routing.cuh"
#include "cake/device/row_pipeline.cuh"
#include "cake/device/workspace.cuh"
#include "core/device_signal.cuh"
#include "core/epoch.h"

namespace moe_ep::cake {

inline constexpr int kBulkDispatchThreads = 512;  // all build the table; some warps send
static_assert(kBulkDispatchThreads >= kMaxEpSize, "a thread a rank");

struct BulkDispatchParams {
  DispatchKernelParams dispatch;
  PipelineShape pipeline;
  RouteTableShape table;
};

// Tells combine what round it is in, and resets the counters that it takes work from. Before this
// kernel ends; nobody in this kernel reads it.
template <int kWords>
__device__ void prepare_combine(const DispatchKernelParams& p, const RankSet<kWords>& active,
                                uint32_t epoch) {
  const DeviceSegment own = own_segment(p.workspace);
  if (threadIdx.x == 0) {
    DeviceState* const state = own.state();
    state->combine_epoch = epoch;
    state->num_tokens = p.num_tokens;
    state->tokens_per_rank = p.tokens_per_rank;
    RankMask mask;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      mask.words[w / 2] |= static_cast<uint64_t>(active.words[w]) << (w % 2 * 32);
    }
    state->active = mask;
    state->combine_items = 0;
    state->stage_items = 0;
  }
  if (static_cast<int32_t>(threadIdx.x) < p.workspace.ep_size) own.staged_items()[threadIdx.x] = 0;
}

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

// To the peers' row of this rank. For one CTA, before its arrival.
template <int kWords>
__device__ void send_stats(const DispatchKernelParams& p, const RankSet<kWords>& active) {
  if (p.eplb_local_stats == nullptr) return;
  for (int32_t rank = 0; rank < p.workspace.ep_size; ++rank) {
    if (!active.contains(rank)) continue;
    int32_t* const stats = DeviceSegment(p.workspace, rank).eplb_stats(p.workspace.ep_rank);
    for (int32_t i = threadIdx.x; i < p.workspace.eplb_stats_num_experts; i += blockDim.x) {
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
             blockIdx.x == 0 ? kArrivalsPerRound - (gridDim.x - 1) : 1);
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
  // Behind the barriers all threads may read what the sources sent.
  const bool failed = __syncthreads_or(!arrived);
  const bool disagree = __syncthreads_or(!agrees);
  if (disagree && !failed) {
    if (threadIdx.x < kWarpSize) settle_disagreement(p, active, epoch);
    __syncthreads();
  }
  allow_next_kernel();
  if (failed || disagree) void_round(p);
  deliver_stats(p, active);
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
  const bool failed = has_failed(p.workspace);
  const uint32_t epoch = own_segment(p.workspace).state()->dispatch_epoch + 1;
  const RankSet<kWords> active = active_ranks<kWords>(p.workspace, p.active);
  pipeline.reserve();

  for (int64_t first = 0;;) {
    const int64_t end = first + params.table.tokens;
    const bool is_last = end >= p.num_tokens;
    table.scan(active, static_cast<int32_t>(first));
    // Threads may differ in what they saw of a failure; behind the barrier they agree.
    if (__syncthreads_or(failed)) {
      if (leads) void_round(p);
      return;
    }
    // After the ids: a burst of rows would hold them up.
    if (first == 0) pipeline.fill();
    table.count_rows();
    const bool has_items = pipeline.item() != kNoItem;
    if (!__syncthreads_or(has_items || leads)) break;  // started late: the others did it all
    if (leads && is_last) {
      // Not by the first warps, which have rows to send in any case.
      const int32_t peer = static_cast<int32_t>(threadIdx.x) - (kBulkDispatchThreads - kMaxEpSize);
      if (peer >= 0 && peer < p.workspace.ep_size && active.contains(peer)) {
        send_header(p, peer, table.total(peer), round_signature(p, active), epoch);
      }
    }
    send_rows(p, active, table, pipeline, end);
    if (is_last) break;
    first = end;
    __syncthreads();  // the table is read no more
  }

  blank_rows_without_token(p, active);
  if (leads) {
    send_stats(p, active);
    prepare_combine(p, active, epoch);
  }
  bulk_wait<0>();
  __syncthreads();
  signal_arrival(p, active);
  if (leads) receive(p, active, epoch);
}

}  // namespace moe_ep::cake
