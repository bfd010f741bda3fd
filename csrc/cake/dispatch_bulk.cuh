// Dispatch of many tokens: rows go straight to their place at the receiver, in bulk copies. The
// kernel goes as in_place_dispatch.cuh has it.
//
// Order: bulk stores are complete for the thread that issued them after its bulk_wait; a CTA
// barrier hands that on to the threads that signal, and the release at system scope to the peers.
#pragma once

#include <cstdint>

#include "cake/device/row_pipeline.cuh"
#include "cake/namespace.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/destinations.cuh"
#include "one_sided/device/in_place_dispatch.cuh"
#include "one_sided/device/own_block.cuh"
#include "one_sided/device/picks.cuh"
#include "one_sided/device/route_table.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/architecture.cuh"
#include "transport/device/memory_access.cuh"
#include "transport/device/schedule.cuh"

namespace moe_ep::cake {

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

// Of one thread: rows in bulk, as dispatch_in_place asks for them.
template <int kWords, BulkInputs kInputs>
class BulkRows {
 public:
  using Pipeline = RowPipeline<kInputs != BulkInputs::kAny>;

  __device__ BulkRows(const BulkDispatchParams& params, Pipeline& pipeline)
      : params_(params), p_(params.dispatch), pipeline_(pipeline), targets_(params.dispatch) {}

  __device__ void wait_for_previous_kernel(const DeviceState* state) const {
    if constexpr (kIsUsual) {
      wait_for_previous_kernel_knowing(pipeline_.counter_address(), state, targets_.address_bits());
    } else {
      wait_for_previous_kernel_knowing(pipeline_.counter_address(), state);
    }
  }
  __device__ void reserve() { pipeline_.reserve(); }
  __device__ void ask_ids(RouteTable<kWords>& table, int32_t first) {
    if constexpr (kIsUsual) ids_ = table.ask_usual(first);
  }
  // First the ids are asked for, then rows: a burst of rows would hold the ids up. Rows that the
  // lanes copy themselves come after the scan: they keep the lanes busy.
  __device__ void scan(RouteTable<kWords>& table, const RankSet<kWords>& active, int32_t first) {
    constexpr int kLoads = kWords > 1 ? 1 : 8;  // what the registers have room for
    const auto fill = [&] {
      if (first == 0) pipeline_.fill();
    };
    if constexpr (kIsUsual) {
      table.scan_usual(params_.owners, active, ids_, fill);
    } else if constexpr (kAllInBulk) {
      table.template scan<kLoads>(active, first, fill);
    } else {
      table.template scan<kLoads>(active, first, [] {});
      fill();
    }
  }
  __device__ bool has_items() const { return pipeline_.item() != kNoItem; }
  __device__ void top_up() { pipeline_.top_up(); }
  __device__ void send(const RankSet<kWords>& active, const RouteTable<kWords>& table,
                       int32_t end) {
    if constexpr (kIsUsual) {
      send_usual_rows(p_, active, table, targets_, pipeline_, end);
    } else {
      send_rows(p_, active, table, pipeline_, end);
    }
  }
  __device__ void complete() const { bulk_wait<0>(); }
  __device__ void drain() { pipeline_.drain(); }

 private:
  static constexpr bool kIsUsual = kInputs == BulkInputs::kUsual;
  static constexpr bool kAllInBulk = kInputs != BulkInputs::kAny;

  const BulkDispatchParams& params_;
  const DispatchKernelParams& p_;
  Pipeline& pipeline_;
  UsualTargets targets_;
  UsualBatch ids_;
};

// At most 128 registers a thread, so that 512 fit; one CTA a multiprocessor.
template <int kWords, BulkInputs kInputs>
__global__ void __launch_bounds__(kInPlaceThreads, 1)
    dispatch_bulk_kernel(const __grid_constant__ BulkDispatchParams params) {
  if constexpr (kHasBulkCopies) {
    extern __shared__ __align__(128) uint8_t shared[];
    typename BulkRows<kWords, kInputs>::Pipeline pipeline(params.dispatch, params.pipeline, shared);
    RouteTable<kWords> table(params.dispatch, params.table, shared + params.pipeline.bytes());
    BulkRows<kWords, kInputs> rows(params, pipeline);
    dispatch_in_place(params.dispatch, params.table, table, rows);
  }
}

}  // namespace moe_ep::cake
