// Dispatch of few tokens: one hop, no fence, no atomics and no barrier between a row at its source
// and the same row at its owner.
//
// Every warp works out the routes for itself from the ids. It first does its share of the sends,
// which never wait, then its share of the rows to receive. A row's packets say themselves that they
// have arrived; a source's header says how many rows to wait for.
//
// Packet slots and headers of source s are written by s in its dispatch and read here in ours. They
// are written again in s's next dispatch, after the waits of its combine, which this rank satisfies
// only after this kernel. What the packets are unpacked to is written by this rank alone.
//
// A warp waits for sends that are dealt to all CTAs of a peer, so all of these must get to run
// beside what waits. This rests on small grids: those of all ranks that share a GPU together fill,
// on average, at most half of its registers and an eighth of its threads (see the launcher), and
// what is launched behind a grid starts when that has done waiting. To take the sends from a
// counter instead would cost a round trip to memory before the first of them.
#pragma once

#include <cstdint>

#include "cake/cuda_params.h"
#include "cake/device/announcements.cuh"
#include "cake/device/destinations.cuh"
#include "cake/device/memory_access.cuh"
#include "cake/device/packet_books.cuh"
#include "cake/device/packet_receive.cuh"
#include "cake/device/packet_round.cuh"
#include "cake/device/packet_send.cuh"
#include "cake/device/routing.cuh"
#include "cake/device/workspace.cuh"

namespace moe_ep::cake {

inline constexpr int kPacketCtaThreads = 128;
inline constexpr int kPacketCtasPerSm = 2;  // see the launcher

// Which part of the sends, then of the receives, a warp has: tasks first, first + step, ...
struct Share {
  int32_t first;
  int32_t step;
};

// Sends this warp's share. Returns where its share of the receives begins.
template <int kWords, bool kWhole>
__device__ int32_t send_share(const PacketDispatchParams& params, const Round<kWords>& round,
                              const Routes<kWords>& routes, ThreadWords& words, Share share) {
  const int32_t rows = params.dispatch.num_tokens * params.record.pieces;
  const int32_t sends = rows + params.stats.pieces;
  int32_t task = share.first;
#pragma unroll 1
  while (task < rows) {
    const int32_t token = params.by_record_pieces.divide(task);
    const int32_t piece = task - token * params.record.pieces;
    send_piece<kWords, kWhole>(params, routes, round.epoch, token, piece, words);
    task += share.step;
    if (task < rows) words = load_task<kWhole>(params, task);
  }
#pragma unroll 1
  for (; task < sends; task += share.step) send_stats(params, round, task - rows);
  return task - sends;
}

template <int kWords, bool kWhole>
__device__ void receive_share(const PacketDispatchParams& params, const Round<kWords>& round,
                              bool failed, Share share) {
  const int32_t peers = params.dispatch.workspace.ep_size - 1;
  const int32_t rows = peers * params.dispatch.tokens_per_rank * params.record.pieces;
  const int32_t receives = rows + peers * params.stats.pieces;
  Announcements<kWords> sources(params.dispatch, round, failed);
  int32_t task = share.first;
#pragma unroll 1
  for (; task < rows; task += share.step) {
    receive_row<kWords, kWhole>(params, round, task, sources);
  }
#pragma unroll 1
  for (; task < receives; task += share.step) receive_stats(params, round, task - rows, sources);
}

template <int kWords, bool kWhole>
__global__ void __launch_bounds__(kPacketCtaThreads, kPacketCtasPerSm)
    dispatch_packets(const __grid_constant__ PacketDispatchParams params) {
  wait_for_previous_kernel();
  const DispatchKernelParams& p = params.dispatch;
  // Neighbours in the list of tasks are on different SMs; warp 0 keeps the books.
  const auto warp = static_cast<int32_t>(threadIdx.x / kWarpSize * gridDim.x + blockIdx.x);
  Share share{warp - 1, static_cast<int32_t>(gridDim.x * (kPacketCtaThreads / kWarpSize)) - 1};

  // Epoch, ids and the first piece of a row fly together: nothing here looks at what it loads.
  const volatile DeviceState* const state = own_segment(p.workspace).state();
  const uint32_t state_word = *(lane_id() == 0 ? &state->dispatch_epoch : &state->failed);
  const auto ids = IdBlock<kWhole>::load(p, min(lane_id(), max(p.num_tokens, 1) - 1), 0);
  ThreadWords words{};
  if (warp > 0 && share.first < p.num_tokens * params.record.pieces) {
    words = load_task<kWhole>(params, share.first);
  }
  Round<kWords> round;
  round.active = active_ranks<kWords>(p.workspace, p.active);
  round.epoch = __shfl_sync(kAllLanes, state_word, 0) + 1;
  round.signature = round_signature(p, round.active);
  const bool failed = __shfl_sync(kAllLanes, state_word, 1) != 0;
  const Routes<kWords> routes = find_routes(p, round.active, ids);

  if (warp > 0) {
    if (!failed) share.first = send_share<kWords, kWhole>(params, round, routes, words, share);
    receive_share<kWords, kWhole>(params, round, failed, share);
  } else if (!failed) {
    keep_books(p, round, routes);
  } else {
    keep_nothing(p);
  }
  allow_next_kernel();
}

}  // namespace moe_ep::cake
