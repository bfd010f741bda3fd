// Combine for many tokens: the copy engine brings a piece of all of a token's rows into one stage
// of a ring in shared memory, a warp sums them from there. Each warp has its own ring, and items
// come from a counter.
#pragma once

#include <cstdint>

#include "cake/combine_plan.h"
#include "cake/cuda_params.h"
#include "cake/device/combine_enter.cuh"
#include "cake/device/item_feed.cuh"
#include "cake/device/memory_access.cuh"
#include "cake/device/row_sum.cuh"
#include "cake/device/token_rows.cuh"

namespace moe_ep::cake {

// Measured on one H200 and on two, 128 to 4096 tokens of 14336 bytes: seven warps with two stages,
// and pieces of up to seven vectors (a quarter of a row), were fastest.
inline constexpr int kBulkWarps = 7;
inline constexpr int kBulkStages = 2;
inline constexpr uint32_t kMaxBulkVectors = 7;

struct BulkPlan {
  uint32_t vectors;      // of 512 bytes, in a piece
  uint32_t piece_bytes;  // and from one row of a stage to the next
  uint32_t parts;        // pieces of a row; the last one may be shorter
};

struct BulkCombine {
  CombineKernelParams combine;
  StagePlan stage;
  BulkPlan plan;
};

struct StagedPiece {
  uint32_t item;
  int32_t rows;
};

// What one warp has in shared memory, and what it knows about it.
class PieceRing {
 public:
  // Before the first use, one call by the whole warp.
  __device__ PieceRing(const BulkCombine& c, uint8_t* stages, BulkBarrier* arrived,
                       StagedPiece* pieces, uint32_t total)
      : c_(c), stages_(stages), arrived_(arrived), pieces_(pieces), total_(total) {
    if (lane_id() < kBulkStages) arrived_[lane_id()].init();
    BulkBarrier::publish_init();
    __syncwarp();
  }
  __device__ uint8_t* stage(int s) const {
    return stages_ + static_cast<uint32_t>(s) * stage_bytes(c_);
  }
  __device__ static uint32_t stage_bytes(const BulkCombine& c) {
    return static_cast<uint32_t>(c.combine.workspace.max_destinations) * c.plan.piece_bytes;
  }
  // Lane j brings in row j; in the stage the rows lie in the order of the list.
  __device__ void load(int s, const Item& item, bool valid) {
    const bool is_item = item.index < total_;
    const TokenRows rows = locate_rows(c_.combine, item.slot, valid && is_item);
    if (lane_id() == 0) pieces_[s] = {is_item ? item.index : kNoItem, rows.count};
    if (is_item) {
      const uint32_t part = item.index % c_.plan.parts;
      const uint64_t offset = static_cast<uint64_t>(part) * c_.plan.piece_bytes;
      const auto bytes =
          static_cast<uint32_t>(min(c_.combine.pitch - offset, uint64_t{c_.plan.piece_bytes}));
      const int lane = lane_id();
      if (lane == 0) arrived_[s].expect(static_cast<uint32_t>(rows.count) * bytes);
      if (lane < rows.count) {
        bulk_load(stage(s) + static_cast<uint32_t>(lane) * c_.plan.piece_bytes, rows.row + offset,
                  bytes, arrived_[s]);
      }
    }
    __syncwarp();
  }
  // Waits for what `load` has brought; item kNoItem: nothing, nor will later stages have any.
  __device__ StagedPiece wait(int s, uint32_t parity) {
    const StagedPiece piece = pieces_[s];
    if (piece.item != kNoItem) arrived_[s].wait(parity);
    return piece;
  }
  // The warp has read the stage: it may be loaded again.
  __device__ void release() {
    fence_shared_to_bulk();
    __syncwarp();
  }

 private:
  const BulkCombine& c_;
  uint8_t* stages_;
  BulkBarrier* arrived_;
  StagedPiece* pieces_;
  uint32_t total_;
};

// Sums kVectors vectors of a piece that lies in `stage`, and stores them.
template <RowType kType, int kVectors>
__device__ void sum_vectors(const BulkCombine& c, uint8_t* stage, int32_t rows, bool valid,
                            uint8_t* out, int64_t out_bytes) {
  float sum[kVectors][Chunk<kType>::kElements];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) start(sum[v], valid);
  const uint8_t* row = stage + lane_id() * 16;
#pragma unroll 2
  for (int32_t j = 0; j < rows; ++j, row += c.plan.piece_bytes) {
    uint4 chunk[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      chunk[v] = *reinterpret_cast<const uint4*>(row + v * static_cast<int>(kVectorBytes));
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) Chunk<kType>::add(sum[v], chunk[v]);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int byte = v * static_cast<int>(kVectorBytes);
    // Its place in the first row is free now: each lane has read what it overwrites.
    store_vector<kType>(out + byte, out_bytes - byte, Chunk<kType>::round(sum[v]),
                        c.combine.output_is_aligned, reinterpret_cast<uint4*>(stage + byte));
  }
}

template <RowType kType>
__device__ void sum_piece(const BulkCombine& c, uint8_t* stage, StagedPiece piece, bool valid) {
  const uint32_t token = piece.item / c.plan.parts;
  const auto offset = static_cast<int64_t>(piece.item - token * c.plan.parts) *
                      static_cast<int64_t>(c.plan.piece_bytes);
  const int64_t bytes = c.combine.row_bytes - offset;
  uint8_t* const out =
      c.combine.output + static_cast<int64_t>(token) * c.combine.row_bytes + offset;
  const auto vectors = static_cast<uint32_t>(
      min((bytes + kVectorBytes - 1) / kVectorBytes, int64_t{c.plan.vectors}));
  const auto sum = [&]<int kVectors>(uint32_t first) {
    const uint32_t byte = first * kVectorBytes;
    sum_vectors<kType, kVectors>(c, stage + byte, piece.rows, valid, out + byte, bytes - byte);
  };
  uint32_t v = 0;
  for (; v + 4 <= vectors; v += 4) sum.template operator()<4>(v);
  if (vectors - v >= 2) {
    sum.template operator()<2>(v);
    v += 2;
  }
  if (v < vectors) sum.template operator()<1>(v);
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

// An item passes through: number taken -> slots loading -> rows loading -> summed.
template <RowType kType>
__global__ void __launch_bounds__(kBulkWarps* kWarpSize, 1)
    combine_bulk_kernel(const __grid_constant__ BulkCombine c) {
  extern __shared__ __align__(128) uint8_t bulk_stages[];
  __shared__ BulkBarrier arrived[kBulkWarps][kBulkStages];
  __shared__ StagedPiece pieces[kBulkWarps][kBulkStages];
  __shared__ StageTable table;
  const CombineKernelParams& p = c.combine;
  const auto warp = threadIdx.x / kWarpSize;
  const uint32_t total = static_cast<uint32_t>(p.num_tokens) * c.plan.parts;
  PieceRing ring(c, bulk_stages + warp * kBulkStages * PieceRing::stage_bytes(c), arrived[warp],
                 pieces[warp], total);

  wait_for_previous_kernel();
  const CombineRound round = read_round(p);
  if (round.failed) fill_with_nan<kType>(p);

  const Share share(total, kBulkWarps, kBulkStages);
  const bool works = warp < share.warps;
  ItemFeed feed(p, total, c.plan.parts);
  Item first[kBulkStages];
  Item next{kNoItem, {-1, 0}};
  if (works) {
    const uint32_t base = feed.take(share.first_items);
#pragma unroll
    for (uint32_t s = 0; s < kBulkStages; ++s) {
      first[s] = feed.at(s < share.first_items ? base + s : kNoItem);
    }
    if (share.more && base < total) {
      feed.look_ahead();
      next = feed.next();
    }
  }
  const bool valid = !round.failed && exchange_rows(p, c.stage, round, table);
  if (!works) return;

  fence_peers_to_bulk();
#pragma unroll
  for (int s = 0; s < kBulkStages; ++s) {
    if (static_cast<uint32_t>(s) < share.first_items) {
      ring.load(s, first[s], valid);
    } else {
      ring.load(s, next, valid);
      next = feed.next();
    }
  }
  int s = 0;
  for (uint32_t parity = 0;;) {
    const StagedPiece piece = ring.wait(s, parity);
    if (piece.item == kNoItem) break;
    sum_piece<kType>(c, ring.stage(s), piece, valid);
    ring.release();
    ring.load(s, next, valid);
    next = feed.next();
    if (++s == kBulkStages) {
      s = 0;
      parity ^= 1;
    }
  }
}

}  // namespace moe_ep::cake
