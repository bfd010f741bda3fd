// The sends of a combine by push: they never wait.
#pragma once

#include <cstdint>

#include "core/device_signal.cuh"
#include "one_sided/cuda_params.h"
#include "one_sided/device/combine_enter.cuh"
#include "one_sided/device/packets.cuh"
#include "one_sided/device/push_round.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/stage_rows.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::one_sided {

// A piece of a row that the experts may have left for a source. Known without a look at memory.
struct PushJob {
  int32_t row;           // of the source's block
  const int32_t* count;  // of rows in that block
  const uint8_t* chunks[kPushUnits];
  const uint8_t* row_end;
  uint8_t* packets;  // this thread's first, at the source

  __device__ static PushJob of(const PushCombine& c, int32_t task) {
    const CombineKernelParams& p = c.combine;
    PushJob job;
    const int32_t slot = c.by_pieces.divide(task);
    const int32_t piece = task - slot * c.shape.pieces;
    // The next rank first and one's own last, so that not all send to the same one.
    const int32_t behind = c.by_tokens_per_rank.divide(slot);
    int32_t source = p.workspace.ep_rank + 1 + behind;
    if (source >= p.workspace.ep_size) source -= p.workspace.ep_size;
    job.row = slot - behind * p.tokens_per_rank;
    job.count = own_segment(p.workspace).recv_counts() + source;
    // Lanes behind the last thread do what that does.
    const int32_t q = min(piece * kWarpSize + lane_id(), c.shape.threads - 1);
    const uint8_t* const row =
        c.rows + (static_cast<int64_t>(source) * p.tokens_per_rank + job.row) * c.stride;
#pragma unroll
    for (int k = 0; k < kPushUnits; ++k) {  // what is behind the end is looked at by nobody
      const int32_t chunk = min(c.shape.chunk(q, k), c.units - 1);
      job.chunks[k] = row + static_cast<uint32_t>(chunk) * static_cast<uint32_t>(kPushUnitBytes);
    }
    job.row_end = row + p.row_bytes;
    job.packets = DeviceSegment(p.workspace, source).combine_packets(p.workspace.ep_rank, job.row) +
                  c.shape.packet_offset(q, 0);
    return job;
  }
  __device__ PushWords load(const PushCombine& c) const {
    PushWords words;
    if (c.rows_are_whole) {
#pragma unroll
      for (int k = 0; k < kPushUnits; ++k) words.set_unit(k, load_unit(chunks[k]));
    } else {
#pragma unroll
      for (int k = 0; k < kPushUnits; ++k) {
        const auto bytes = static_cast<int32_t>(min(row_end - chunks[k], kPushUnitBytes));
        uint4 unit = make_uint4(0, 0, 0, 0);
        if (bytes > 0) unit = load_unaligned(chunks[k], bytes);
        words.set_unit(k, make_uint2(unit.x, unit.y));
      }
    }
    return words;
  }
};

// Sends this warp's share: tasks task, task + step, ... `job`, `count` and `words` are the first of
// it, if there is any, and loaded whether it has a token or not. Returns where the warp's share of
// the receives begins. valid: whether anything is to be sent.
__device__ inline int32_t push_share(const PushCombine& c, const CombineRound& round, bool valid,
                                     PushJob job, int32_t count, PushWords words, int32_t task,
                                     int32_t step) {
  const int32_t sends = c.sends();
#pragma unroll 1
  while (task < sends) {
    if (valid && job.row < count) store_push_packets(job.packets, c.shape, words, round.epoch());
    task += step;
    if (task >= sends) break;
    job = PushJob::of(c, task);
    count = *job.count;
    words = job.load(c);
  }
  return task - sends;
}

}  // namespace moe_ep::one_sided
