// How a dispatch goes whose rows are put in place and whose tokens are any number. What moves the
// rows, and when a warp asks for them, is up to the kernel.
//
// A rank's CTAs share nothing but a counter of items. Each CTA that has sent its items adds to the
// arrival word at every peer; CTA 0 alone waits for the peers, once its own part is done. So CTAs
// of a grid, and grids of ranks that share a GPU, need not run together.
#pragma once

#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/agreement.cuh"
#include "one_sided/device/dispatch_tail.cuh"
#include "one_sided/device/picks.cuh"
#include "one_sided/device/prepare_combine.cuh"
#include "one_sided/device/route_table.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::one_sided {

inline constexpr int kInPlaceThreads = 512;  // all build the table
static_assert(kInPlaceThreads >= kMaxEpSize, "a thread a rank");

// What the peers and combine get to know besides rows. For CTA 0 and its last warps, which are the
// last to have rows: so no row waits for it.
template <int kWords>
__device__ void announce(const DispatchKernelParams& p, const RankSet<kWords>& active,
                         const RouteTable<kWords>& table, uint32_t epoch) {
  constexpr uint32_t kThreads = kInPlaceThreads / 2;
  static_assert(kThreads >= kMaxEpSize, "a thread a rank");
  if (threadIdx.x < kInPlaceThreads - kThreads) return;
  const uint32_t thread = threadIdx.x - (kInPlaceThreads - kThreads);
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

// The whole kernel. By all threads of every CTA. Rows, of which a kernel has one for each thread:
//   wait_for_previous_kernel(state)
//   reserve()                   asks for the numbers of the first items, and does not look at them
//   ask_ids(table, first)       asks for the ids of the step that begins with that token
//   scan(table, active, first)  reads them; of the first step, it asks for the first rows meanwhile
//   has_items()                 of this warp, the same for all lanes
//   top_up()                    asks for more rows, when the table is being made
//   send(active, table, end)    sends the items at hand that are of tokens before `end`
//   complete()                  returns when what this thread has sent is in place
//   drain()                     instead of sending, of a round that failed
template <int kWords, typename Rows>
__device__ void dispatch_in_place(const DispatchKernelParams& p, const RouteTableShape& shape,
                                  RouteTable<kWords>& table, Rows& rows) {
  const DeviceState* const state = own_segment(p.workspace).state();
  const bool leads = blockIdx.x == 0;

  rows.wait_for_previous_kernel(state);
  rows.reserve();
  rows.ask_ids(table, 0);
  RoundBefore before = RoundBefore::load(state);
  const RankSet<kWords> active = active_ranks<kWords>(p.workspace, p.active);

  for (int32_t first = 0;;) {
    const int32_t end = first + min(shape.tokens, p.num_tokens - first);
    const bool is_last = end == p.num_tokens;
    rows.scan(table, active, first);
    // Threads may differ in what they saw of a failure; behind the barrier they agree.
    if (__syncthreads_or(held(before.failed) != 0)) {
      if (first == 0) rows.drain();
      if (leads) void_round(p);
      return;
    }
    table.count_rows();
    const bool has_items = rows.has_items();
    if (!__syncthreads_or(has_items || leads)) break;  // started late: the others did it all
    if (first == 0) rows.top_up();
    if (leads && is_last) announce(p, active, table, held(before.epoch) + 1);
    rows.send(active, table, end);
    if (is_last) break;
    first = end;
    before.failed = 0;
    __syncthreads();  // the table is read no more
    rows.ask_ids(table, first);
  }

  blank_rows_without_token(p, active);
  rows.complete();
  __syncthreads();
  signal_arrival(p, active);
  if (leads) receive(p, active, held(before.epoch) + 1);
}

}  // namespace moe_ep::one_sided
