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

struct PushCombine {
  CombineKernelParams combine;
  RecordShape shape;  // how the chunks of a row are dealt
  int32_t chunks;     // of a row
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
    const auto chunks = static_cast<int32_t>(p.pitch / kRowAlignment);
    const RecordShape shape = RecordShape::of(chunks);
    return {
        .combine = p,
        .shape = shape,
        .chunks = chunks,
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
