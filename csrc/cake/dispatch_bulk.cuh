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

#include "cake/device/row_pipeline.cuh"
#include "cake/namespace.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/agreement.cuh"
#include "one_sided/device/bounded_wait.cuh"
#include "one_sided/device/destinations.cuh"
#include "one_sided/device/dispatch_tail.cuh"
#include "one_sided/device/own_block.cuh"
#include "one_sided/device/picks.cuh"
#include "one_sided/device/route_table.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"
#include "transport/device/schedule.cuh"

namespace moe_ep::cake {

inline constexpr int kBulkDispatchThreads = 512;  // all build the table; some warps send
static_assert(kBulkDispatchThreads >= kMaxEpSize, "a thread a rank");

struct BulkDispatchParams {
  DispatchKernelParams dispatch;
  PipelineShape pipeline;
  RouteTableShape table;
  EvenOwners owners;
};

// How a launch is specialised.
enum class BulkInputs {
  kAny,
  kAllInBulk,  // all payloads are aligned, so that the copy engine reads all rows
  // These, and UsualPicks; up to 32 ranks, all of which own the same number of experts.
  kUsual,
};

// Sends the parts at hand while they are of tokens before `end`, whose rows the table knows.
template <int kWords, bool kAllInBulk>
__device__ void send_rows(const DispatchKernelParams& p, const RankSet<kWords>& active,
                          const RouteTable<kWords>& table, RowPipeline<kAllInBulk>& pipeline,
                          int32_t end) {
  const uint32_t end_item = pipeline.first_item_of(end);
  for (;;) {
    const uint32_t item = pipeline.item();
    if (item >= end_item) return;  // kNoItem, too
    const RowPart at_hand = pipeline.part_of(item);
    const auto token = static_cast<int32_t>(at_hand.token);
    Place places[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      places[w] = table.of_rank(w * kWarpSize + lane_id()).place(p, token);
    }
    Pick pick{};
    if (at_hand.part == 0) pick = load_pick(p, token);  // meanwhile the row arrives
    pipeline.await();
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (!places[w].sent) continue;
      const OwnBlock block(p, w * kWarpSize + lane_id());
      pipeline.send(at_hand.part, block, static_cast<uint32_t>(places[w].row));
    }
    pipeline.end_sends();
    if (at_hand.part == 0) {
      send_picks(p, active, places, token, pick);
      write_send_slots(p, places, token);
    }
    pipeline.advance();
  }
}

// Where a warp's usual sends go, known before the kernel must wait for the one before it.
struct UsualTargets {
  OwnBlock block;        // at this lane's rank
  SendSlot* send_slots;  // of token 0

  __device__ explicit UsualTargets(const DispatchKernelParams& p)
      : block(p, lane_id()), send_slots(held(own_segment(p.workspace).send_slots(0))) {}
  __device__ uint64_t address_bits() const {
    return block.address_bits() | reinterpret_cast<uint64_t>(send_slots);
  }
};

// The same for usual inputs, with all that does not change from item to item in registers: a warp
// alone takes 1 us for 370 instructions, and waits for little else.
__device__ inline void send_usual_rows(const DispatchKernelParams& p, const RankSet<1>& active,
                                       const RouteTable<1>& table, const UsualTargets& targets,
                                       RowPipeline<true>& pipeline, int32_t end) {
  const uint32_t end_item = held(pipeline.first_item_of(end));
  const RankRoutes routes = table.of_rank(lane_id());
  for (;;) {
    const uint32_t item = pipeline.item();
    if (item >= end_item) return;  // kNoItem, too
    const RowPart at_hand = pipeline.part_of(item);
    const Place places[1] = {routes.place(p, static_cast<int32_t>(at_hand.token))};
    UsualPicks picks;
    if (at_hand.part == 0) picks = UsualPicks::load(p, at_hand.token);  // meanwhile the row arrives
    pipeline.await();
    if (places[0].sent) {
      pipeline.send(at_hand.part, targets.block, static_cast<uint32_t>(places[0].row));
    }
    pipeline.end_sends();
    if (at_hand.part == 0) {
      send_usual_picks(p, active, targets.block, places, at_hand.token, picks);
      const auto first_slot = static_cast<uint64_t>(at_hand.token) *
                              static_cast<uint32_t>(p.workspace.max_destinations);
      write_send_slots(p, places, targets.send_slots + first_slot);
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

// What a kernel reads of its rank's state, as it was loaded: who looks at it waits for it.
struct RoundBefore {
  uint32_t epoch;
  uint32_t failed;

  __device__ static RoundBefore load(const volatile DeviceState* state) {
    return {state->dispatch_epoch, state->failed};
  }
};

// At most 128 registers a thread, so that 512 fit; one CTA a multiprocessor.
template <int kWords, BulkInputs kInputs>
__global__ void __launch_bounds__(kBulkDispatchThreads, 1)
    dispatch_bulk_kernel(const __grid_constant__ BulkDispatchParams params) {
  constexpr bool kAllInBulk = kInputs != BulkInputs::kAny;
  extern __shared__ __align__(128) uint8_t shared[];
  const DispatchKernelParams& p = params.dispatch;
  RowPipeline<kAllInBulk> pipeline(p, params.pipeline, shared);
  RouteTable<kWords> table(p, params.table, shared + params.pipeline.bytes());
  const DeviceState* const state = own_segment(p.workspace).state();
  const bool leads = blockIdx.x == 0;

  const UsualTargets targets(p);
  if constexpr (kInputs == BulkInputs::kUsual) {
    wait_for_previous_kernel_knowing(pipeline.counter_address(), state, targets.address_bits());
  } else {
    wait_for_previous_kernel_knowing(pipeline.counter_address(), state);
  }
  pipeline.reserve();
  UsualBatch ids;
  if constexpr (kInputs == BulkInputs::kUsual) ids = table.ask_usual(0);
  RoundBefore before = RoundBefore::load(state);
  const RankSet<kWords> active = active_ranks<kWords>(p.workspace, p.active);

  for (int32_t first = 0;;) {
    const int32_t end = first + min(params.table.tokens, p.num_tokens - first);
    const bool is_last = end == p.num_tokens;
    // First the ids are asked for, then rows: a burst of rows would hold the ids up. Rows that the
    // lanes copy themselves come after the scan: they keep the lanes busy.
    constexpr int kLoads = kWords > 1 ? 1 : 8;  // what the registers have room for
    const auto fill = [&] {
      if (first == 0) pipeline.fill();
    };
    if constexpr (kInputs == BulkInputs::kUsual) {
      table.scan_usual(params.owners, active, ids, fill);
    } else if constexpr (kAllInBulk) {
      table.template scan<kLoads>(active, first, fill);
    } else {
      table.template scan<kLoads>(active, first, [] {});
      fill();
    }
    // Threads may differ in what they saw of a failure; behind the barrier they agree.
    if (__syncthreads_or(held(before.failed) != 0)) {
      if (first == 0) pipeline.drain();
      if (leads) void_round(p);
      return;
    }
    table.count_rows();
    const bool has_items = pipeline.item() != kNoItem;
    if (!__syncthreads_or(has_items || leads)) break;  // started late: the others did it all
    if (first == 0) pipeline.top_up();
    if (leads && is_last) announce(p, active, table, held(before.epoch) + 1);
    if constexpr (kInputs == BulkInputs::kUsual) {
      send_usual_rows(p, active, table, targets, pipeline, end);
    } else {
      send_rows(p, active, table, pipeline, end);
    }
    if (is_last) break;
    first = end;
    before.failed = 0;
    __syncthreads();  // the table is read no more
    if constexpr (kInputs == BulkInputs::kUsual) ids = table.ask_usual(first);
  }

  blank_rows_without_token(p, active);
  bulk_wait<0>();
  __syncthreads();
  signal_arrival(p, active);
  if (leads) receive(p, active, held(before.epoch) + 1);
}

}  // namespace moe_ep::cake
