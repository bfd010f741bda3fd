// The sends of a packet dispatch: they never wait.
#pragma once

#include <cstdint>

#include "cake/cuda_params.h"
#include "cake/device/announcements.cuh"
#include "cake/device/packet_round.cuh"
#include "cake/device/record.cuh"
#include "cake/device/record_access.cuh"
#include "cake/device/routing.cuh"
#include "cake/device/workspace.cuh"

namespace moe_ep::cake {

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

// What a warp sends as this task, except for the ids.
template <bool kWhole>
__device__ ThreadWords load_task(const PacketDispatchParams& p, int32_t task) {
  const int32_t token = p.by_record_pieces.divide(task);
  const int32_t piece = task - token * p.record.pieces;
  return load_record<kWhole>(p.parts, p.record, token, piece * kWarpSize + lane_id());
}

// Sends a piece to all ranks of the token; one's own rows need no packets. The first piece also
// leaves the list of the token's rows for combine.
template <int kWords, bool kWhole>
__device__ void send_piece(const PacketDispatchParams& params, const Routes<kWords>& routes,
                           uint32_t epoch, int32_t token, int32_t piece, ThreadWords& words) {
  const DispatchKernelParams& p = params.dispatch;
  const int lane = lane_id();
  const int32_t q = piece * kWarpSize + lane;
  const bool invalid = load_ids(p, params.parts, params.record, token, q, words);
  SendSlot* const slots = own_segment(p.workspace).send_slots(token);
  int32_t num_slots = 0;
  int32_t row_at_self = -1;
#pragma unroll 1
  for (int w = 0; w < kWords; ++w) {
    const uint32_t ranks = __shfl_sync(kAllLanes, routes.ranks_of_token(w), token);
    const int32_t row_here = routes.row_of(w, token);
#pragma unroll 1
    for (uint32_t left = ranks; left != 0; left &= left - 1) {
      const int bit = __ffs(static_cast<int>(left)) - 1;
      const int32_t rank = w * kWarpSize + bit;
      const int32_t row = __shfl_sync(kAllLanes, row_here, bit);
      if (rank == p.workspace.ep_rank) {
        row_at_self = row;
      } else if (q < params.record.threads) {
        const DeviceSegment peer(p.workspace, rank);
        store_packets(peer.dispatch_packets(p.workspace.ep_rank, row), params.record, q, words,
                      epoch);
      }
    }
    if (piece == 0 && ((ranks >> lane) & 1)) {
      slots[num_slots + __popc(ranks & bits_below(lane))] = {w * kWarpSize + lane, row_here};
    }
    num_slots += __popc(ranks);
  }
  if (row_at_self >= 0) {
    const int64_t block = static_cast<int64_t>(p.workspace.ep_rank) * p.tokens_per_rank;
    store_record<kWhole>(params.parts, params.record, block + row_at_self, q, words);
  }
  if (piece == 0 && lane == 0 && num_slots < p.workspace.max_destinations) {
    slots[num_slots] = {-1, 0};
  }
  if (invalid) report_thread_ids(params, token, q);
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
    store_packets(DeviceSegment(p.workspace, rank).stats_packets(own), params.stats, q, words,
                  round.epoch);
  }
}

}  // namespace moe_ep::cake
