// The first step of a round: where this rank's tokens go, how many rows come from whom, and whether
// all mean the same round. Each CTA has a slice of the tokens; the last to be done with that speaks
// with the other ranks.
#pragma once

#include <cstdint>

#include "transport/device/bounded_wait.cuh"
#include "transport/device/disagreement.cuh"
#include "transport/device/memory_access.cuh"
#include "transport/same_call.h"
#include "two_sided/channels.h"
#include "two_sided/cuda_params.h"
#include "two_sided/device/route_tokens.cuh"
#include "two_sided/device/write_ids.cuh"

namespace moe_ep::two_sided {

__device__ inline int32_t thread_number() { return static_cast<int32_t>(threadIdx.x); }

// Calls visit(rank, bound) for each, by all threads.
template <typename Visit>
__device__ void for_each_bound(const Geometry& g, const Visit& visit) {
  const int32_t bounds = g.num_channels + 1;
  for (int32_t i = thread_number(); i < g.ep_size * bounds; i += kPrepareThreads) {
    const int32_t rank = i / bounds;
    visit(rank, i - rank * bounds);
  }
}

// Of one thread for each rank; what it signals follows a barrier behind the bounds.
__device__ inline void send_header(const PrepareKernelParams& p, int32_t rank, int32_t rows,
                                   uint32_t epoch) {
  RoundHeader& header = p.workspace.at(rank).round_header(p.call.workspace.ep_rank);
  header.num_rows = rows;
  header.tokens_per_rank = p.call.tokens_per_rank;
  header.has_weights = p.call.has_weights;
  header.has_stats = 0;
  header.num_payloads = static_cast<int16_t>(p.call.fields.num_fields);
  header.top_k = static_cast<int16_t>(p.call.workspace.geometry.top_k);
  header.num_experts = p.call.workspace.geometry.num_experts;
  for (int32_t i = 0; i < kMaxPayloads; ++i) {
    header.row_bytes[i] = i < p.call.fields.num_fields ? p.call.fields.row_bytes[i] : 0;
  }
  signal_store(&header.dispatched, epoch, p.workspace.reach);
}

// False: the wait has expired.
__device__ inline bool await_header(const PrepareKernelParams& p, int32_t source, uint32_t epoch) {
  const RoundHeader& header = p.workspace.own().round_header(source);
  Patience patience;
  for (;;) {
    const uint32_t seen = poll(&header.dispatched);
    if (epoch_reached(seen, epoch)) return true;
    if (patience.exhausted(p.workspace, Phase::kDispatch, source, epoch, seen)) return false;
  }
}

// Tells the host what each rank said. All threads; all ranks come here together.
__device__ inline void record_headers(const PrepareKernelParams& p) {
  StatusPage* const page = p.workspace.page;
  const Segment own = p.workspace.own();
  const bool is_first =
      __syncthreads_or(thread_number() == 0 && has_earlier_disagreement(page)) == 0;
  if (!is_first) return;
  for (int32_t rank = thread_number(); rank < p.call.workspace.geometry.ep_size;
       rank += kPrepareThreads) {
    page->disagreement.headers[rank] = own.round_header(rank);
  }
  __syncthreads();
  if (thread_number() == 0) publish_disagreement(page, Phase::kDispatch);
}

// What alltoallv and combine need to know of the round.
__device__ inline void begin_round(const PrepareKernelParams& p, uint32_t epoch, bool has_rows) {
  DeviceRound& round = p.workspace.own().device_round();
  round.epoch = epoch;
  round.poisoned = has_rows ? 0 : 1;
  round.num_tokens = p.call.num_tokens;
  round.tokens_per_rank = p.call.tokens_per_rank;
  round.fields = hash_of(p.call.fields);
  round.dispatch_groups = 0;
  round.combine_groups = 0;
  round.prepared = 0;
}

// By all threads: whether all headers came, and say the same. A rank that has failed sends none.
__device__ inline bool meet(const PrepareKernelParams& p, uint32_t epoch, bool failed) {
  const Segment own = p.workspace.own();
  const int32_t rank = thread_number();
  const bool has_rank = !failed && rank < p.call.workspace.geometry.ep_size;
  const bool came = has_rank ? await_header(p, rank, epoch) : !failed;
  if (__syncthreads_and(came) == 0) return false;
  const bool same =
      !has_rank || same_round(own.round_header(rank), own.round_header(p.call.workspace.ep_rank));
  if (__syncthreads_and(same) != 0) return true;
  record_headers(p);
  return false;
}

// Whether all other CTAs are done with their slices. By all threads.
__device__ inline bool comes_last(DeviceRound& round) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) is_last = signal_and_count(&round.prepared, 1) + 1 == gridDim.x;
  __syncthreads();
  return is_last;
}

__global__ void __launch_bounds__(kPrepareThreads, 1)
    prepare_kernel(const __grid_constant__ PrepareKernelParams p) {
  __shared__ TokenRouting::Counts counts;
  __shared__ InvalidIds invalid_ids;
  static_assert(kMaxEpSize <= kPrepareThreads);
  const Segment own = p.workspace.own();
  const Geometry& g = p.call.workspace.geometry;
  DeviceRound& round = own.device_round();
  const uint32_t epoch = round.epoch + 1;
  const bool failed = has_failed(p.workspace);
  const int32_t rank = thread_number();  // that this thread speaks with

  TokenRouting routing(p, counts);
  routing.count();
  routing.write_lists();
  routing.for_each_bound([&](int32_t peer, int32_t bound, int32_t rows) {
    own.send_bounds(peer)[bound] = rows;
    if (!failed) p.workspace.at(peer).row_bounds(p.call.workspace.ep_rank)[bound] = rows;
  });
  const bool is_last = comes_last(round);
  if (is_last && !failed && rank < g.ep_size) send_header(p, rank, counts.total[rank], epoch);

  write_ids(p, routing.first_token(), routing.end_token(), invalid_ids);
  blank_rest(p, int64_t{counts.begin[g.ep_size - 1]} + counts.total[g.ep_size - 1]);
  if (!is_last) return;
  const bool has_rows = meet(p, epoch, failed);
  allow_next_kernel();
  if (has_rows) {
    for_each_bound(g, [&](int32_t source, int32_t bound) {
      own.recv_bounds(source)[bound] = own.row_bounds(source)[bound];
    });
  }
  if (rank < g.ep_size) {
    own.list_begins()[rank] = counts.begin[rank];
    p.call.out_send_counts[rank] = counts.total[rank];
    p.call.out_recv_counts[rank] = has_rows ? own.round_header(rank).num_rows : 0;
  }
  if (rank == 0) begin_round(p, epoch, has_rows);
}

}  // namespace moe_ep::two_sided
