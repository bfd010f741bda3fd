// What the warps of a combine by push share: its parameters, and when flags may be set.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/fast_divide.h"
#include "core/workspace_layout.h"
#include "one_sided/combine_plan.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/packets.cuh"
#include "one_sided/device/routing.cuh"

namespace moe_ep::one_sided {

// A thread has three units of 8 bytes of a row, which are two packets.
inline constexpr int kPushUnits = 3;
inline constexpr int kPushPackets = 2;
inline constexpr int64_t kPushUnitBytes = 8;

__device__ inline uint2 load_unit(const void* from) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1},[%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(from)
               : "memory");
  return v;
}

struct PushWords {
  uint32_t words[2 * kPushUnits];

  __device__ void set_unit(int k, uint2 v) {
    words[2 * k] = v.x;
    words[2 * k + 1] = v.y;
  }
  __device__ uint2 unit(int k) const { return make_uint2(words[2 * k], words[2 * k + 1]); }
};

__device__ inline void store_push_packets(uint8_t* at, const RecordShape& shape,
                                          const PushWords& words, uint32_t epoch) {
#pragma unroll
  for (int j = 0; j < kPushPackets; ++j, at += shape.step()) {
    store_packet(at, make_uint4(words.words[3 * j], words.words[3 * j + 1], words.words[3 * j + 2],
                                packet_tag(epoch)));
  }
}

struct PushPackets {
  uint4 packets[kPushPackets];

  __device__ void load(const uint8_t* at, const RecordShape& shape) {
#pragma unroll
    for (int j = 0; j < kPushPackets; ++j, at += shape.step()) packets[j] = load_packet(at);
  }
  __device__ bool are_of(uint32_t epoch) const {
    bool all = true;
#pragma unroll
    for (int j = 0; j < kPushPackets; ++j) all &= packets[j].w == packet_tag(epoch);
    return all;
  }
  __device__ PushWords words() const {
    PushWords words;
#pragma unroll
    for (int j = 0; j < kPushPackets; ++j) {
      words.words[3 * j] = packets[j].x;
      words.words[3 * j + 1] = packets[j].y;
      words.words[3 * j + 2] = packets[j].z;
    }
    return words;
  }
};

struct PushCombine {
  CombineKernelParams combine;
  RecordShape shape;  // how the units of a row are dealt
  int32_t units;      // of a row
  uint32_t packets_per_slot;
  FastDivider by_pieces;
  FastDivider by_tokens_per_rank;
  // Where the experts have left their rows: in the workspace, or in a tensor of the user's.
  const uint8_t* rows;
  int64_t stride;
  bool rows_are_whole;  // chunks start on 16 bytes, and are all there
  // What is sent may lie where this rank's sums go, or the next rows of a source: a flag and a sum
  // must then follow all reads.
  bool reads_come_first;

  static PushCombine of(const CombineKernelParams& p) {
    const DeviceWorkspace& w = p.workspace;
    const bool in_place = p.expert_output == nullptr;
    const auto units = static_cast<int32_t>(p.pitch / kPushUnitBytes);
    const RecordShape shape = RecordShape::of(units);
    return {
        .combine = p,
        .shape = shape,
        .units = units,
        .packets_per_slot = static_cast<uint32_t>(w.combine_slot_bytes / PacketSlots::kPacketBytes),
        .by_pieces = FastDivider(std::max(shape.pieces, 1)),
        .by_tokens_per_rank = FastDivider(std::max(p.tokens_per_rank, 1)),
        .rows = in_place ? w.base + w.ep_rank * w.rank_stride + w.layout.combine_rows.offset
                         : p.expert_output,
        .stride = in_place ? static_cast<int64_t>(p.pitch) : p.expert_output_stride,
        .rows_are_whole = in_place || p.expert_output_is_aligned,
        .reads_come_first = !in_place && one_sided::reads_come_first(p)};
  }
  // A task is a piece of a row for a warp. Rows to one's own rank are sent, too: the receivers then
  // have one case, and it is no later than what comes from others.
  MOE_EP_HOST_DEVICE int32_t sends() const {
    return combine.workspace.ep_size * combine.tokens_per_rank * shape.pieces;
  }
  MOE_EP_HOST_DEVICE int32_t receives() const { return combine.num_tokens * shape.pieces; }
};

}  // namespace moe_ep::one_sided
