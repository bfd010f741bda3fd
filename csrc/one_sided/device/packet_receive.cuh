// The receives of a packet dispatch: waiting for packets, and unpacking them.
#pragma once

#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/announcements.cuh"
#include "one_sided/device/bounded_wait.cuh"
#include "one_sided/device/packet_round.cuh"
#include "one_sided/device/packets.cuh"
#include "one_sided/device/record.cuh"
#include "one_sided/device/record_access.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::one_sided {

// Waits for a warp's piece of what `source` sends as its row `row`; -1 stands for what comes
// without rows. `packets` begin with this thread's first. False: it does not come.
template <int kWords>
__device__ bool receive_piece(const RecordShape& shape, const uint8_t* packets, int32_t q,
                              int32_t source, int32_t row, uint32_t epoch,
                              Announcements<kWords>& sources, ThreadWords& words) {
  sources.look_at(source);
  Patience patience;
  for (;;) {  // header and row are looked at together
    const bool known = sources.knows(source);
    if (known && sources.rows_of(source) <= row) return false;
    uint4 header = make_uint4(0, 0, 0, 0);
    if (!known) header = sources.load();
    bool ready = true;
    if (q < shape.threads) {
      ThreadPackets arriving;
      arriving.load(packets, shape);
      ready = arriving.are_of(epoch);
      words = arriving.words();
    }
    if (!known) {
      sources.take(header);
      if (sources.knows(source)) {
        if (sources.rows_of(source) <= row) return false;
      } else {
        ready = false;
      }
    }
    if (__all_sync(kAllLanes, ready)) return true;
    if (sources.expired(patience, source, header)) return false;
  }
}

// A row without a token. One warp.
__device__ inline void clear_row(const DispatchKernelParams& p, int64_t row) {
  const int lane = lane_id();
  if (lane >= p.workspace.top_k) return;
  p.out_topk_ids[row * p.workspace.top_k + lane] = p.invalid_expert_id;
  if (p.has_weights) p.out_topk_weights[row * p.workspace.top_k + lane] = 0.0f;
}

// A piece of a row that may come, as its receiver sees it. Known without a look at memory.
struct ReceiveJob {
  int32_t piece;
  int32_t q;
  int32_t source;
  int32_t row;      // of the source's block
  int64_t out_row;  // of all
  const uint8_t* packets;
  ChunkPlaces outputs;

  template <PacketInputs kInputs>
  __device__ static ReceiveJob of(const PacketDispatchParams& params, int32_t task) {
    const DispatchKernelParams& p = params.dispatch;
    ReceiveJob job;
    const int32_t slot = params.by_record_pieces.divide(task);
    job.piece = task - slot * params.record.pieces;
    job.source = params.by_tokens_per_rank.divide(slot);
    job.row = slot - job.source * p.tokens_per_rank;
    if (job.source >= p.workspace.ep_rank) ++job.source;
    job.q = job.piece * kWarpSize + lane_id();
    job.out_row = static_cast<int64_t>(job.source) * p.tokens_per_rank + job.row;
    job.packets = own_segment(p.workspace).dispatch_packets(job.source, job.row) +
                  params.record.packet_offset(job.q, 0);
    job.outputs = params.places<kInputs, false>(job.out_row, job.q);
    return job;
  }
};

template <int kWords, PacketInputs kInputs>
__device__ void receive_row(const PacketDispatchParams& params, const Round<kWords>& round,
                            const ReceiveJob& job, Announcements<kWords>& sources) {
  ThreadWords words;
  if (receive_piece(params.record, job.packets, job.q, job.source, job.row, round.epoch, sources,
                    words)) {
    params.store<kInputs>(job.outputs, job.q, words);
  } else if (job.piece == params.record.pieces - 1) {
    clear_row(params.dispatch, job.out_row);
  }
}

template <int kWords>
__device__ void receive_stats(const PacketDispatchParams& params, const Round<kWords>& round,
                              int32_t task, Announcements<kWords>& sources) {
  const DispatchKernelParams& p = params.dispatch;
  int32_t source = params.by_stats_pieces.divide(task);
  const int32_t q = (task - source * params.stats.pieces) * kWarpSize + lane_id();
  if (source >= p.workspace.ep_rank) ++source;
  const int32_t num_experts = p.workspace.eplb_stats_num_experts;
  int32_t* const out = p.out_eplb_stats + static_cast<int64_t>(source) * num_experts;
  const uint8_t* const packets =
      own_segment(p.workspace).stats_packets(source) + params.stats.packet_offset(q, 0);
  ThreadWords words;
  if (!receive_piece(params.stats, packets, q, source, -1, round.epoch, sources, words)) {
    words = {};
  }
  if (q >= params.stats.threads) return;
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
    store_words(out, num_experts, params.stats.chunk(q, k), words.chunk(k));
  }
}

}  // namespace moe_ep::one_sided
