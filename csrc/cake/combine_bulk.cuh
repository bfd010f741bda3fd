// Combine for many tokens: the copy engine brings a piece of all of a token's rows into one stage
// of a ring in shared memory, a warp sums them from there. Each warp has its own ring, and items
// come from a counter.
#pragma once

#include <cstdint>

#include "cake/device/vector_sums.cuh"
#include "cake/namespace.h"
#include "core/fast_divide.h"
#include "one_sided/combine_plan.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/combine_enter.cuh"
#include "one_sided/device/item_feed.cuh"
#include "one_sided/device/rows_read.cuh"
#include "one_sided/device/token_rows.cuh"
#include "transport/device/architecture.cuh"
#include "transport/device/memory_access.cuh"
#include "transport/device/row_sum.cuh"

namespace moe_ep::cake {

// Measured on one H200 and on two, 128 to 4096 tokens of 14336 bytes: seven warps with two stages,
// and pieces of up to seven vectors (a quarter of a row), were fastest.
inline constexpr int kBulkWarps = 7;  // that sum; one more speaks with the peers
inline constexpr int kBulkThreads = (kBulkWarps + 1) * kWarpSize;
inline constexpr int kBulkStages = 2;
inline constexpr int kMaxBulkVectors = 7;

struct BulkPlan {
  uint32_t piece_bytes;  // and from one row of a stage to the next
  uint32_t last_part;    // of a row, which may be shorter:
  uint32_t last_bytes;
  uint32_t padding;  // behind a row of the output, up to the end of the row in the workspace

  __device__ uint32_t bytes_of(uint32_t part) const {
    return part == last_part ? last_bytes : piece_bytes;
  }
};

// The launcher computes all that it knows: a warp alone issues some 370 instructions in 1 us.
struct BulkCombine {
  CombineKernelParams combine;
  StagePlan stage;
  BulkPlan plan;
  ItemPlan items;
  Share share;
  RowBlocks blocks;
};

// A piece of a token's sum, and where lane j finds that piece of the token's row j.
struct LocatedPiece {
  uint32_t token;  // kNoItem: none
  uint32_t part;
  TokenRows rows;
  uint32_t bytes;  // in a row

  __device__ LocatedPiece(const BulkCombine& c, const Item& item)
      : token(item.token),
        part(item.part),
        rows(locate_rows(c.blocks, item.slot)),
        bytes(c.plan.bytes_of(part)) {
    rows.row += uint64_t{part} * c.plan.piece_bytes;
  }
};

struct StagedPiece {
  uint32_t token;  // kNoItem: nothing, nor will later stages have any
  uint32_t part;
  int32_t rows;
};

// The stages of one warp in shared memory, filled and emptied in turn.
class PieceRing {
 public:
  // All warps. `memory` has bytes(c).
  __device__ PieceRing(const BulkCombine& c, uint8_t* memory, BulkBarrier* arrived)
      : c_(c), memory_(kept_address(memory)), arrived_(kept_address(arrived)) {
    if (lane_id() == 0) {
#pragma unroll
      for (int s = 0; s < kBulkStages; ++s) arrived_[s].init();
    }
    BulkBarrier::publish_init();
    __syncwarp();
  }
  __device__ static uint32_t bytes(const BulkCombine& c) { return kBulkStages * stage_bytes(c); }

  // Fills the next stage. Lane j brings in row j; in the stage the rows lie in the order of the
  // list. valid: whether the sum may be formed; if not, no row is looked at.
  __device__ void load(const LocatedPiece& piece, bool valid) {
    const int lane = lane_id();
    const int count = valid ? piece.rows.count : 0;
    BulkBarrier& arrived = arrived_[turn_ % kBulkStages];
    if (lane == 0) arrived.expect(static_cast<uint32_t>(count) * piece.bytes);
    if (lane < count) {
      bulk_load(stage() + static_cast<uint32_t>(lane) * c_.plan.piece_bytes, piece.rows.row,
                piece.bytes, arrived);
    }
    __syncwarp();
#pragma unroll
    for (int s = 1; s < kBulkStages; ++s) pieces_[s - 1] = pieces_[s];
    pieces_[kBulkStages - 1] = {piece.token, piece.part, count};
    ++turn_;
  }
  // The piece in the next stage, when all have been filled, and where its rows are after `wait`.
  __device__ StagedPiece front() const { return pieces_[0]; }
  __device__ uint8_t* stage() const { return memory_ + turn_ % kBulkStages * stage_bytes(c_); }
  __device__ void wait() { arrived_[turn_ % kBulkStages].wait(turn_ / kBulkStages % 2); }
  // The warp has read the stage: it may be filled again.
  __device__ void release() {
    fence_shared_to_bulk();
    __syncwarp();
  }

 private:
  __device__ static uint32_t stage_bytes(const BulkCombine& c) {
    return static_cast<uint32_t>(c.combine.workspace.max_destinations) * c.plan.piece_bytes;
  }
  // The same address. Without the shuffle the assembler computes it again at each use, from
  // special registers.
  template <typename T>
  __device__ static T* kept_address(T* shared) {
    return static_cast<T*>(
        __cvta_shared_to_generic(__shfl_sync(kAllLanes, shared_address(shared), 0)));
  }

  const BulkCombine& c_;
  uint8_t* memory_;
  BulkBarrier* arrived_;
  StagedPiece pieces_[kBulkStages];  // in the order in which they were loaded
  uint32_t turn_ = kBulkStages;      // of the next stage; the first to wait has parity 0
};

// What stands for a token's rows where there are none: the sum of this row is +0, or NaN if it may
// not be formed. Each lane writes what it will read.
template <RowType kType>
__device__ void fill_row(uint8_t* row, uint32_t bytes, bool valid) {
  constexpr uint32_t kNanWord =
      Chunk<kType>::kNan * (kType == RowType::kFloat32 ? 1u : 0x00010001u);
  const uint32_t word = valid ? 0 : kNanWord;
#pragma unroll 1
  for (uint32_t byte = static_cast<uint32_t>(lane_id()) * 16; byte < bytes; byte += kVectorBytes) {
    *reinterpret_cast<uint4*>(row + byte) = make_uint4(word, word, word, word);
  }
}

// Sums a piece of kFewest to kMost vectors. refill: loads the stage again, as soon as it has been
// read. Code of its own for each number of vectors, found by halves.
template <RowType kType, bool kAsFp8, int kFewest, int kMost, typename Refill>
__device__ void sum_piece(const BulkCombine& c, const StagedPiece& piece, uint8_t* stage,
                          const Refill& refill) {
  const uint32_t bytes = c.plan.bytes_of(piece.part);
  if constexpr (kFewest == kMost) {
    uint8_t* const out = c.combine.output +
                         piece.token * static_cast<uint64_t>(c.combine.row_bytes) +
                         uint64_t{piece.part} * c.plan.piece_bytes;
    const uint32_t padding = piece.part == c.plan.last_part ? c.plan.padding : 0;
    const VectorSums<kType, kMost, kAsFp8> sums(stage, piece.rows, c.plan.piece_bytes,
                                                bytes - padding);
    if (!c.combine.output_is_aligned) {
      // Through the stage: each lane has read what it overwrites there.
      sums.store_unaligned(out, bytes - padding, stage);
    }
    refill();
    if (c.combine.output_is_aligned) sums.store(out, bytes);
  } else {
    constexpr int kMiddle = (kFewest + kMost) / 2;
    if (bytes <= kMiddle * kVectorBytes) {
      sum_piece<kType, kAsFp8, kFewest, kMiddle>(c, piece, stage, refill);
    } else {
      sum_piece<kType, kAsFp8, kMiddle + 1, kMost>(c, piece, stage, refill);
    }
  }
}

// After a failure the counter may not have been reset, so that its items need not be all: each
// thread has a fixed share, too.
template <RowType kType>
__device__ void fill_with_nan(const CombineKernelParams& p) {
  auto* const out = reinterpret_cast<typename Chunk<kType>::Element*>(p.output);
  const int64_t elements = p.num_tokens * p.hidden_size;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < elements;
       i += threads) {
    out[i] = Chunk<kType>::kNan;
  }
}

// An item passes through: number taken -> slots loading -> rows loading -> summed. The warp that
// speaks with the peers takes none, so that it waits for nothing but flags.
// kAsFp8: the rows are summed as if they had travelled as FP8.
template <RowType kType, PulledRows kRows, bool kAsFp8>
__global__ void __launch_bounds__(kBulkThreads, 1)
    combine_bulk_kernel(const __grid_constant__ BulkCombine c) {
  if constexpr (kHasBulkCopies) {
    extern __shared__ __align__(128) uint8_t bulk_stages[];
    __shared__ BulkBarrier arrived[kBulkWarps + 1][kBulkStages];
    const CombineKernelParams& p = c.combine;
    const auto warp = threadIdx.x / kWarpSize;
    PieceRing ring(c, bulk_stages + warp * PieceRing::bytes(c), arrived[warp]);

    begin_combine<kRows>(p, c.stage);
    ItemFeed feed(p, c.items);
    Item first = kNothing;
    Item next = kNothing;
    bool ready = true;
    if (speaks_with_peers()) {
      ready = exchange_flags<kRows>(p);
    } else if (warp < c.share.warps) {
      const uint32_t base = feed.take(c.share.first_items);
      first = feed.at(base);
      if (c.share.more && base < c.items.total) feed.look_ahead();
      // Its slots may still be on their way when the flags are there: they are looked at behind the
      // first loads.
      next = c.share.first_items == kBulkStages ? feed.at(base + 1) : feed.next();
    }
    static_assert(kBulkStages == 2);
    const LocatedPiece located(c, first);
    const bool valid = agree_on_rows(ready);
    if (!valid && has_failed(p.workspace)) fill_with_nan<kType>(p);

    fence_peers_to_bulk();
    ring.load(located, valid);
    ring.load(LocatedPiece(c, next), valid);
    next = feed.next();
    const auto refill = [&] {
      ring.release();
      ring.load(LocatedPiece(c, next), valid);
      next = feed.next();
    };
    while (ring.front().token != kNoItem) {
      StagedPiece piece = ring.front();
      ring.wait();
      if (piece.rows == 0) {
        fill_row<kType>(ring.stage(), c.plan.piece_bytes, valid);
        piece.rows = 1;
      }
      sum_piece<kType, kAsFp8, 1, kMaxBulkVectors>(c, piece, ring.stage(), refill);
    }
    tell_rows_read(p);
  }
}

}  // namespace moe_ep::cake
