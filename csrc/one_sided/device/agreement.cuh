// Headers of a round on CUDA, and what the ranks do when one shows that they were called with
// different arguments.
//
// Slot s of a rank's round_headers is written by rank s and read by its owner. The first 16 bytes
// are one packet, which every dispatch writes; the details behind it only a rank that has seen a
// signature other than its own. If two active ranks differ, every rank sees such a signature, so
// all come here together. A slot is written again in the next dispatch, which the waits of combine
// order after its owner's reads: its epoch cannot be ahead, and is compared with ==.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/device_signal.cuh"
#include "one_sided/cuda_params.h"
#include "one_sided/device/bounded_wait.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/disagreement.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::one_sided {

// The packet of a header: x num_rows, y tokens_per_rank, z signature, w dispatched.
static_assert(offsetof(RoundHeader, num_rows) == 0 && offsetof(RoundHeader, tokens_per_rank) == 4 &&
              offsetof(RoundHeader, signature) == 8 && offsetof(RoundHeader, dispatched) == 12);

// header: this rank's at a peer.
__device__ inline void send_header(const DispatchKernelParams& p, RoundHeader* header,
                                   int32_t num_rows, uint32_t signature, uint32_t epoch) {
  store_packet(header, make_uint4(static_cast<uint32_t>(num_rows),
                                  static_cast<uint32_t>(p.tokens_per_rank), signature, epoch));
}
__device__ inline void send_header(const DispatchKernelParams& p, int32_t peer, int32_t num_rows,
                                   uint32_t signature, uint32_t epoch) {
  send_header(p, DeviceSegment(p.workspace, peer).round_header(p.workspace.ep_rank), num_rows,
              signature, epoch);
}

__device__ inline uint4 load_header(const DeviceWorkspace& workspace, int32_t source) {
  return load_packet(own_segment(workspace).round_header(source));
}

// Of a header that has this round's epoch. The signature covers tokens_per_rank; looking at both
// uses every word of the packet, so that its load stays one access.
__device__ inline bool header_agrees(const DispatchKernelParams& p, uint4 header,
                                     uint32_t signature) {
  return header.z == signature && header.y == static_cast<uint32_t>(p.tokens_per_rank);
}

// No rows in this round, as far as combine and the user are concerned.
__device__ inline void clear_recv_counts(const DispatchKernelParams& p) {
  int32_t* const own_counts = own_segment(p.workspace).recv_counts();
  for (int32_t source = lane_id(); source < p.workspace.ep_size; source += kWarpSize) {
    p.out_recv_counts[source] = 0;
    own_counts[source] = 0;
  }
}

// Tells a peer what this rank was called with.
__device__ inline void send_details(const DispatchKernelParams& p, int32_t peer, uint32_t epoch) {
  RoundHeader* const header = DeviceSegment(p.workspace, peer).round_header(p.workspace.ep_rank);
  header->has_weights = p.has_weights;
  header->has_stats = p.eplb_local_stats != nullptr;
  header->num_payloads = static_cast<int16_t>(p.num_payloads);
  header->top_k = static_cast<int16_t>(p.workspace.top_k);
  header->num_experts = p.partition.num_experts();
  for (int32_t i = 0; i < kMaxPayloads; ++i) {
    header->row_bytes[i] = i < p.num_payloads ? p.payloads[i].row_bytes : 0;
  }
  signal_store(&header->detailed, epoch, p.workspace.reach);
}

// Waits for a source's whole header. False: the wait has expired, or the source, which has begun
// this round by now, has another mask; it is recorded.
__device__ inline bool await_details(const DispatchKernelParams& p, int32_t source, uint32_t epoch,
                                     RoundHeader& out) {
  const RoundHeader* const header = own_segment(p.workspace).round_header(source);
  Patience patience;
  for (;;) {
    const uint4 packet = load_packet(header);
    const uint32_t detailed = poll(&header->detailed);
    if (packet.w == epoch && detailed == epoch) {
      out = *header;
      out.num_rows = static_cast<int32_t>(packet.x);
      out.tokens_per_rank = static_cast<int32_t>(packet.y);
      out.signature = packet.z;
      out.dispatched = packet.w;
      // In the loop: lanes that still wait are to hear of it.
      if (!has_other_mask(p.workspace, source, epoch)) return true;
      record_missed(p.workspace, Missed::kMasksDiffer, Phase::kDispatch, source, epoch, epoch);
      return false;
    }
    const uint32_t seen = packet.w == epoch ? detailed : packet.w;
    if (patience.exhausted(p.workspace, Phase::kDispatch, source, epoch, seen)) return false;
  }
}

// For one whole warp of the grid, which has seen a header of this epoch with another signature. It
// comes behind what writes DeviceState and the receive counts: in the same warp, or by a barrier.
// The ranks tell each other what they were called with, each tells its host, and the round goes on
// without rows: its sums will be NaN. Headers and arrivals must be sent as in any round. Ranks
// whose masks differ cannot end the round together: each fails, as when a peer is missed.
template <int kWords>
__device__ __noinline__ void settle_disagreement(const DispatchKernelParams& p,
                                                 const RankSet<kWords>& active, uint32_t epoch) {
  const int32_t ep_size = p.workspace.ep_size;
  const int lane = lane_id();
  if (lane == 0) own_segment(p.workspace).state()->poisoned_epoch = epoch;
  clear_recv_counts(p);
  for (int32_t peer = lane; peer < ep_size; peer += kWarpSize) {
    if (active.contains(peer)) send_details(p, peer, epoch);
  }
  uint32_t earlier = 0;  // the host has not yet seen another one
  if (lane == 0) earlier = has_earlier_disagreement(p.workspace.page);
  earlier = __shfl_sync(kAllLanes, earlier, 0);
  bool complete = true;
  for (int32_t source = lane; source < ep_size && complete; source += kWarpSize) {
    RoundHeader header{};
    if (active.contains(source)) complete = await_details(p, source, epoch, header);
    if (earlier == 0) p.workspace.page->disagreement.headers[source] = header;
  }
  if (!__all_sync(kAllLanes, complete)) return;  // the host is told of the time-out instead
  __syncwarp();                                  // lane 0 speaks for what the other lanes wrote
  if (lane == 0 && earlier == 0) publish_disagreement(p.workspace.page, Phase::kDispatch);
}

}  // namespace moe_ep::one_sided
