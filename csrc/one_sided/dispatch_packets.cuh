// Dispatch of few tokens: one hop, no fence, no atomics and no barrier between a row at its source
// and the same row at its owner.
//
// Every warp that sends works out the routes for itself from the ids. A warp first does its share
// of the sends, which never wait, then its share of the rows to receive. A row's packets say
// themselves that they have arrived; a source's header says how many rows to wait for.
//
// Packet slots and headers of source s are written by s in its dispatch and read here in ours. They
// are written again in s's next dispatch, after the waits of its combine, which this rank satisfies
// only after this kernel. What the packets are unpacked to is written by this rank alone.
//
// A warp waits for sends that are dealt to all CTAs of a peer, so all of these must get to run
// beside what waits. This rests on small grids: those of all ranks that share a GPU together fill,
// on average, little more than half of its registers and a quarter of its threads (see the
// launcher), and what is launched behind a grid starts when that has done waiting. To take the
// sends from a counter instead would cost a round trip to memory before the first of them.
#pragma once

#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/announcements.cuh"
#include "one_sided/device/destinations.cuh"
#include "one_sided/device/packet_books.cuh"
#include "one_sided/device/packet_receive.cuh"
#include "one_sided/device/packet_round.cuh"
#include "one_sided/device/packet_send.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"
#include "transport/device/schedule.cuh"

namespace moe_ep::one_sided {

inline constexpr int kPacketThreads = 128;
inline constexpr int kBookWarps = 2;
static_assert(kBookWarps <= kPacketThreads / kWarpSize);
// At most, see the launcher. To be measured: 4 against 2 from 4 tokens and 8 ranks on, where a warp
// has several tasks.
template <PacketInputs kInputs>
inline constexpr int kPacketCtasPerSm = kInputs == PacketInputs::kUsual ? 4 : 2;
// Registers for two more.
template <PacketInputs kInputs>
inline constexpr int kPacketResidentCtas = kPacketCtasPerSm<kInputs> + 2;

// Which part of the sends, then of the receives, a warp has: tasks first, first + step, ...
struct WarpShare {
  int32_t first;
  int32_t step;
};

// Sends this warp's share; `job` and `words` are the first of it, if there is any. Returns where
// its share of the receives begins.
template <int kWords, PacketInputs kInputs>
__device__ int32_t send_share(const PacketDispatchParams& params, const Round<kWords>& round,
                              const Routes<kWords>& routes, SendJob job, ThreadWords words,
                              WarpShare share) {
  const int32_t rows = params.dispatch.num_tokens * params.record.pieces;
  const int32_t sends = rows + params.stats_pieces<kInputs>();
  int32_t task = share.first;
#pragma unroll 1
  while (task < rows) {
    send_piece<kWords, kInputs>(params, routes, round.epoch, job, words);
    task += share.step;
    if (task >= rows) break;
    job = SendJob::of<kInputs>(params, task);
    words = params.load<kInputs>(job.inputs, job.q);
  }
  if constexpr (kInputs != PacketInputs::kUsual) {
#pragma unroll 1
    for (; task < sends; task += share.step) send_stats(params, round, task - rows);
  }
  return task - sends;
}

// `job` is the first of the share.
template <int kWords, PacketInputs kInputs>
__device__ void receive_share(const PacketDispatchParams& params, const Round<kWords>& round,
                              bool failed, ReceiveJob job, WarpShare share) {
  const int32_t peers = params.dispatch.workspace.ep_size - 1;
  const int32_t rows = peers * params.dispatch.tokens_per_rank * params.record.pieces;
  const int32_t receives = rows + peers * params.stats_pieces<kInputs>();
  Announcements<kWords> sources(params.dispatch, round, failed);
  int32_t task = share.first;
#pragma unroll 1
  while (task < rows) {
    receive_row<kWords, kInputs>(params, round, job, sources);
    task += share.step;
    if (task < rows) job = ReceiveJob::of<kInputs>(params, task);
  }
  if constexpr (kInputs != PacketInputs::kUsual) {
#pragma unroll 1
    for (; task < receives; task += share.step) {
      receive_stats(params, round, task - rows, sources);
    }
  }
}

template <int kWords, PacketInputs kInputs>
__global__ void __launch_bounds__(kPacketThreads, kPacketResidentCtas<kInputs>)
    dispatch_packets(const __grid_constant__ PacketDispatchParams params) {
  const DispatchKernelParams& p = params.dispatch;
  // Neighbours in the list of tasks are on different SMs; the first two warps keep the books.
  const auto warp = static_cast<int32_t>(threadIdx.x / kWarpSize * gridDim.x + blockIdx.x);
  WarpShare share{warp - kBookWarps,
                  static_cast<int32_t>(gridDim.x * (kPacketThreads / kWarpSize)) - kBookWarps};
  const int32_t rows = p.num_tokens * params.record.pieces;
  const int32_t all_sends = rows + params.stats_pieces<kInputs>();
  const bool announces = warp == 0;
  const bool keeps_books = warp < kBookWarps;
  const bool sends = !keeps_books && share.first < rows;

  // Addresses are worked out before the wait.
  const DeviceState* const state = own_segment(p.workspace).state();
  const void* const id_address = TokenIds<kWords, kInputs>::address(p);
  SendJob send{};
  ReceiveJob receive{};
  RoundHeader* header = nullptr;  // of ours at rank r, for lane r
  if (sends) {
    send = SendJob::of<kInputs>(params, share.first);
  } else if (announces) {
    header = DeviceSegment(p.workspace, lane_id()).round_header(p.workspace.ep_rank);
  } else {
    receive = ReceiveJob::of<kInputs>(params, max(share.first - all_sends, 0));
  }
  wait_for_previous_kernel_knowing(
      state, id_address, header, send.first_packet, send.inputs.addresses[0],
      send.inputs.addresses[1], send.inputs.addresses[2], receive.packets,
      receive.outputs.addresses[0], receive.outputs.addresses[1], receive.outputs.addresses[2]);

  // Epoch, ids and the first piece of a row fly together: nothing here looks at what it loads.
  const volatile uint32_t* const word = lane_id() == 0 ? &state->dispatch_epoch : &state->failed;
  const uint32_t state_word = *word;
  Routes<kWords> routes{};
  TokenIds<kWords, kInputs> ids;
  ThreadWords words;
  if (announces || sends) ids = TokenIds<kWords, kInputs>::load(p, id_address);
  if (sends) words = params.load<kInputs>(send.inputs, send.q);
  Round<kWords> round;
  if constexpr (kInputs == PacketInputs::kUsual) {
    round.active = {params.usual_ranks};
  } else {
    round.active = active_ranks<kWords>(p.workspace, p.active);
  }
  round.signature = round_signature(p, round.active);
  if ((announces || sends) && lane_id() < p.num_tokens) {
    routes.of_token = ids.ranks(params, round.active);
  }
  round.epoch = __shfl_sync(kAllLanes, state_word, 0) + 1;
  const bool failed = __shfl_sync(kAllLanes, state_word, 1) != 0;

  if (!keeps_books) {
    const bool only_receives = !failed && share.first >= all_sends;
    if (!failed) {
      share.first = send_share<kWords, kInputs>(params, round, routes, send, words, share);
    }
    if (!only_receives) receive = ReceiveJob::of<kInputs>(params, share.first);
    receive_share<kWords, kInputs>(params, round, failed, receive, share);
  } else if (failed) {
    if (announces) keep_nothing(p);
  } else if (announces) {
    announce_rows(p, round, routes, header);
  } else {
    keep_counts(p, round);
  }
  allow_next_kernel();
}

}  // namespace moe_ep::one_sided
