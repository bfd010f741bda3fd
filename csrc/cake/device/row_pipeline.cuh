// Rows of tokens on their way through shared memory. Each working warp has a ring of stages that
// the copy engine fills and empties; lane r sends to rank r.
//
// A token's record is its payload rows back to back, each padded to kRowAlignment. Records go in
// parts, and a part of a token is one item of work. Items are taken from a counter, never fixed to
// a CTA: multiprocessors differ in speed by 20 %, and a CTA that starts late finds nothing left.
#pragma once

#include <cstdint>

#include "cake/device/copy_by_lanes.cuh"
#include "cake/device/pipeline_shape.cuh"
#include "cake/namespace.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/own_block.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::cake {

// Out of line, since it has more loads in flight than its callers have registers to spare.
__device__ __noinline__ inline void copy_with_lanes(uint8_t* to, const uint8_t* from,
                                                    uint32_t bytes, uint64_t alignment) {
  copy_by_lanes(to, from, bytes, alignment);
}

// kAllInBulk: all payloads are aligned, so that the copy engine reads all rows.
template <bool kAllInBulk>
class RowPipeline {
 public:
  // `memory` has shape.bytes(), aligned to kRowAlignment. All warps.
  __device__ RowPipeline(const DispatchKernelParams& p, const PipelineShape& shape, uint8_t* memory)
      : p_(p), shape_(shape), counter_(&own_segment(p.workspace).state()->dispatch_items) {
    const int32_t warp = static_cast<int32_t>(threadIdx.x / kWarpSize);
    rows_ = memory + static_cast<uint32_t>(warp * shape.stages) * shape.part_bytes;
    arrived_ = reinterpret_cast<BulkBarrier*>(memory + static_cast<uint32_t>(shape.warps) *
                                                           shape.stages * shape.part_bytes) +
               warp * shape.stages;
    works_ = static_cast<uint32_t>(warp) < shape.share.warps;
    spare_ = shape.stages - 1;
    if (!works_) return;
    if (lane_id() < shape.stages) arrived_[lane_id()].init();
    BulkBarrier::publish_init();
    __syncwarp();
  }

  // Needed by `reserve`: known before the kernel must wait for the one before it.
  __device__ uint64_t counter_address() const { return counter_.address(); }

  // Asks for the first items; their numbers are on the way while the caller does something else.
  __device__ void reserve() {
    if (works_ && lane_id() == 0) next_ = counter_.take(shape_.share.first_items);
  }

  // Starts the first loads. Then asks for one item more, if there may be one: nobody waits for an
  // atomic behind a burst of rows.
  __device__ void fill() {
    if (!works_) return;
    const uint32_t first = __shfl_sync(kAllLanes, next_, 0);
#pragma unroll 1
    for (uint32_t i = 0; i < shape_.share.first_items; ++i) load_into_free(first + i);
    if (lane_id() == 0) {
      next_ = shape_.share.more && first < shape_.num_items ? counter_.take(1) : kNoItem;
    }
  }

  // Loads what was asked for last, if a stage is free. Some time after `fill`.
  __device__ void top_up() {
    if (works_ && spare_ >= 0) load_next();
  }

  // Returns when nothing is on its way to shared memory. Instead of sending, of a round that failed
  // after `fill`.
  __device__ void drain() {
    if (works_ && item_ != kNoItem) arrived_[lane_id()].wait(0);
  }

  // The item at hand, or kNoItem. The same in all lanes.
  __device__ uint32_t item() const { return __shfl_sync(kAllLanes, item_, stage_); }
  __device__ RowPart part_of(uint32_t item) const {
    const auto token = static_cast<uint32_t>(shape_.by_parts.divide(static_cast<int32_t>(item)));
    return {token, item - token * shape_.parts};
  }
  // Of a token. That of the token behind the last is behind all items, and not kNoItem.
  __device__ uint32_t first_item_of(int32_t token) const {
    return static_cast<uint32_t>(token) * shape_.parts;
  }

  // Returns when the item at hand is in its stage.
  __device__ void await() {
    arrived_[stage_].wait(parity_);
    __syncwarp();  // what lanes copied themselves, each has fenced
  }

  // Sends the part at hand to a row of a rank. Lanes differ in rank and row; each may send several.
  __device__ void send(uint32_t part, const OwnBlock& block, uint32_t row) const {
    const uint8_t* const from = stage_memory(stage_);
    for_each_piece(part, [&](const Piece& piece) {
      bulk_store(block.payload_row(p_, piece.payload, row) + piece.in_row, from + piece.in_stage,
                 piece.bytes);
    });
  }

  __device__ void end_sends() { bulk_commit(); }

  // Goes on to the next item, and fills the stage that was sent one item ago: of the last item the
  // stores may still be reading.
  __device__ void advance() {
    bulk_wait_read<1>();
    __syncwarp();
    if (++spare_ > 0) load_next();
    if (++stage_ == shape_.stages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  // Bytes of one payload within a part.
  struct Piece {
    int32_t payload;
    uint64_t in_row;
    uint32_t in_stage;
    uint32_t bytes;
  };

  __device__ uint32_t bytes_of(uint32_t part) const {
    return part + 1 == shape_.parts ? shape_.last_part_bytes : shape_.part_bytes;
  }

  template <typename Visit>
  __device__ void for_each_piece(uint32_t part, const Visit& visit) const {
    const uint64_t begin = static_cast<uint64_t>(part) * shape_.part_bytes;
    if (part < shape_.parts_of_first) {  // most parts; the loop takes 20 instructions a payload
      visit(Piece{0, begin, 0, bytes_of(part)});
      return;
    }
    const uint64_t end = begin + bytes_of(part);
    uint64_t row_begin = 0;
#pragma unroll 1  // mostly two payloads
    for (int32_t i = 0; i < p_.num_payloads; ++i) {
      const uint64_t row_end = row_begin + p_.placement.pitch[i];
      const uint64_t from = max(begin, row_begin);
      const uint64_t to = min(end, row_end);
      if (from < to) {
        visit(Piece{i, from - row_begin, static_cast<uint32_t>(from - begin),
                    static_cast<uint32_t>(to - from)});
      }
      row_begin = row_end;
    }
  }

  __device__ bool goes_in_bulk(int32_t payload) const {
    return kAllInBulk || p_.payload_is_aligned[payload];
  }

  __device__ uint32_t bytes_in_bulk(uint32_t part) const {
    if constexpr (kAllInBulk) return bytes_of(part);
    uint32_t bytes = 0;
    for_each_piece(part, [&](const Piece& piece) {
      if (goes_in_bulk(piece.payload)) bytes += piece.bytes;
    });
    return bytes;
  }

  // The number was asked for one item ago, and the one after it is asked for now.
  __device__ void load_next() {
    const uint32_t item = __shfl_sync(kAllLanes, next_, 0);
    load_into_free(item);
    if (lane_id() == 0 && item < shape_.num_items) next_ = counter_.take(1);
  }

  // Stages are filled in the order in which they are sent.
  __device__ void load_into_free(uint32_t item) {
    load(to_fill_, item);
    --spare_;
    if (++to_fill_ == shape_.stages) to_fill_ = 0;
  }

  __device__ void load(int32_t stage, uint32_t item) {
    const bool exists = item < shape_.num_items;
    if (lane_id() == stage) item_ = exists ? item : kNoItem;
    if (!exists) return;
    const RowPart row = part_of(item);
    uint8_t* const to = stage_memory(stage);
    if (lane_id() == 0) {
      arrived_[stage].expect(bytes_in_bulk(row.part));
      for_each_piece(row.part, [&](const Piece& piece) {
        if (!goes_in_bulk(piece.payload)) return;
        bulk_load(to + piece.in_stage, row_of(piece.payload, row.token) + piece.in_row, piece.bytes,
                  arrived_[stage]);
      });
    }
    if constexpr (!kAllInBulk) {
      for_each_piece(row.part, [&](const Piece& piece) {
        if (!goes_in_bulk(piece.payload)) copy_piece(piece, row.token, to + piece.in_stage);
      });
      fence_shared_to_bulk();
    }
  }

  __device__ const uint8_t* row_of(int32_t payload, uint32_t token) const {
    const RowsIn& rows = p_.payloads[payload];
    return rows.data + static_cast<uint64_t>(rows.stride) * token;
  }

  // Leaves the bytes between a row's end and its pitch as they are.
  __device__ void copy_piece(const Piece& piece, uint32_t token, uint8_t* to) const {
    const RowsIn& rows = p_.payloads[piece.payload];
    const auto row_bytes = static_cast<uint64_t>(rows.row_bytes);
    const uint64_t end = min(piece.in_row + piece.bytes, row_bytes);
    const uint64_t alignment =
        reinterpret_cast<uint64_t>(rows.data) | static_cast<uint64_t>(rows.stride) | row_bytes;
    copy_with_lanes(to, row_of(piece.payload, token) + piece.in_row,
                    static_cast<uint32_t>(end - piece.in_row), alignment);
  }

  __device__ uint8_t* stage_memory(int32_t stage) const {
    return rows_ + static_cast<uint32_t>(stage) * shape_.part_bytes;
  }

  const DispatchKernelParams& p_;
  const PipelineShape& shape_;
  ItemCounter counter_;
  uint8_t* rows_;            // of this warp's stages
  BulkBarrier* arrived_;     // of this warp's stages
  bool works_;               // this warp takes items; if not, it never has one
  uint32_t item_ = kNoItem;  // lane s: of stage s
  uint32_t next_ = kNoItem;  // lane 0: taken from the counter, not loaded
  int32_t stage_ = 0;        // of the item at hand
  uint32_t parity_ = 0;
  int32_t to_fill_ = 0;  // the stage that is filled next
  int32_t spare_;        // stages without an item to come, less the one that was sent last
};

}  // namespace moe_ep::cake
