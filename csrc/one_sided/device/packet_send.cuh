// The sends of a packet dispatch: they never wait.
#pragma once

#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/announcements.cuh"
#include "one_sided/device/packet_round.cuh"
#include "one_sided/device/packets.cuh"
#include "one_sided/device/record.cuh"
#include "one_sided/device/record_access.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/workspace.cuh"

namespace moe_ep::one_sided {

// Apart, so that what is rare takes no registers from the rest.
__device__ __noinline__ void report_thread_ids(const PacketDispatchParams& params, int32_t token,
                                               int32_t q) {
#pragma unroll 1
  for (int k = 0; k < kChunksPerThread; ++k) {
    const int32_t first = kWordsPerChunk * (params.record.chunk(q, k) - params.parts.ids_begin);
    const int32_t end = min(first + kWordsPerChunk, params.dispatch.workspace.top_k);
    for (int32_t slot = max(first, 0); slot < end; ++slot) {
      const int64_t expert = expert_id(params.dispatch, token, slot);
      if (is_invalid(params.dispatch, expert)) {
        record_invalid_id(params.dispatch, token, slot, expert);
      }
    }
  }
}

// A piece of a token's record, as its sender sees it. Known without a look at memory.
struct SendJob {
  int32_t token;
  int32_t piece;
  int32_t q;
  ChunkPlaces inputs;
  uint8_t* first_packet;  // this thread's, of row 0 of what this rank sends to rank 0

  template <PacketInputs kInputs>
  __device__ static SendJob of(const PacketDispatchParams& params, int32_t task) {
    const DispatchKernelParams& p = params.dispatch;
    SendJob job;
    job.token = params.by_record_pieces.divide(task);
    job.piece = task - job.token * params.record.pieces;
    job.q = job.piece * kWarpSize + lane_id();
    job.inputs = params.places<kInputs, true>(job.token, job.q);
    job.first_packet = DeviceSegment(p.workspace, 0).dispatch_packets(p.workspace.ep_rank, 0) +
                       params.record.packet_offset(job.q, 0);
    return job;
  }
};

// Sends a piece to all ranks of the token; one's own rows need no packets. The first piece also
// leaves the list of the token's rows for combine.
template <int kWords, PacketInputs kInputs>
__device__ void send_piece(const PacketDispatchParams& params, const Routes<kWords>& routes,
                           uint32_t epoch, const SendJob& job, ThreadWords& words) {
  const DispatchKernelParams& p = params.dispatch;
  const int lane = lane_id();
  const bool invalid = kInputs == PacketInputs::kUsual
                           ? settle_ids(params.usual, params.record, params.owners.num_experts,
                                        p.invalid_expert_id, job.q, words)
                           : load_ids(p, params.parts, params.record, job.token, job.q, words);
  SendSlot* const slots = own_segment(p.workspace).send_slots(job.token);
  int32_t num_slots = 0;
  int32_t row_at_self = -1;
#pragma unroll 1
  for (int w = 0; w < kWords; ++w) {
    const uint32_t ranks = routes.ranks_of(w, job.token);
    int32_t row_here = 0;  // of lane r at rank 32 * w + r
#pragma unroll 1
    for (uint32_t left = ranks; left != 0; left &= left - 1) {
      const int bit = __ffs(static_cast<int>(left)) - 1;
      const int32_t rank = w * kWarpSize + bit;
      const int32_t row = __popc(routes.tokens_to(w, bit) & bits_below(job.token));
      if (lane == bit) row_here = row;
      if (rank == p.workspace.ep_rank) {
        row_at_self = row;
      } else if (job.q < params.record.threads) {
        store_packets(job.first_packet + rank * p.workspace.rank_stride +
                          static_cast<uint32_t>(row) * p.workspace.dispatch_slot_bytes,
                      params.record, words, epoch);
      }
    }
    if (job.piece == 0 && ((ranks >> lane) & 1)) {
      slots[num_slots + __popc(ranks & bits_below(lane))] = {w * kWarpSize + lane, row_here};
    }
    num_slots += __popc(ranks);
  }
  if (row_at_self >= 0) {
    const int64_t row = int64_t{p.workspace.ep_rank} * p.tokens_per_rank + row_at_self;
    const ChunkPlaces outputs = params.places<kInputs, false>(row, job.q);
    params.store<kInputs>(outputs, job.q, words);
  }
  if (job.piece == 0 && lane == 0 && num_slots < p.workspace.max_destinations) {
    slots[num_slots] = {-1, 0};
  }
  if (invalid) report_thread_ids(params, job.token, job.q);
}

template <int kWords>
__device__ void send_stats(const PacketDispatchParams& params, const Round<kWords>& round,
                           int32_t piece) {
  const DispatchKernelParams& p = params.dispatch;
  const int32_t q = piece * kWarpSize + lane_id();
  if (q >= params.stats.threads) return;
  const int32_t num_experts = p.workspace.eplb_stats_num_experts;
  const int32_t own = p.workspace.ep_rank;
  int32_t* const out = p.out_eplb_stats + static_cast<int64_t>(own) * num_experts;
  ThreadWords words;
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
    words.set_chunk(k, load_words(p.eplb_local_stats, num_experts, params.stats.chunk(q, k)));
  }
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
    store_words(out, num_experts, params.stats.chunk(q, k), words.chunk(k));
  }
#pragma unroll 1
  for (int32_t rank = 0; rank < p.workspace.ep_size; ++rank) {
    if (rank == own || !round.active.contains(rank)) continue;
    uint8_t* const packets = DeviceSegment(p.workspace, rank).stats_packets(own);
    store_packets(packets + params.stats.packet_offset(q, 0), params.stats, words, round.epoch);
  }
}

}  // namespace moe_ep::one_sided
