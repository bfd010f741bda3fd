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
#include "cake/device/vector_sums.cuh"
#include "core/fast_divide.h"

namespace moe_ep::cake {

// Measured on one H200 and on two, 128 to 4096 tokens of 14336 bytes: seven warps with two stages,
// and pieces of up to seven vectors (a quarter of a row), were fastest.
inline constexpr int kBulkWarps = 7;  // that sum; one more speaks with the peers
inline constexpr int kBulkThreads = (kBulkWarps + 1) * kWarpSize;
inline constexpr int kBulkStages = 2;
inline constexpr uint32_t kMaxBulkVectors = 7;

struct BulkPlan {
  uint32_t vectors;      // of 512 bytes, in a piece
  uint32_t piece_bytes;  // and from one row of a stage to the next
  uint32_t parts;        // pieces of a row; the last one may be shorter
  FastDivider by_parts;
};

struct BulkCombine {
  CombineKernelParams combine;
  StagePlan stage;
  BulkPlan plan;
};

// A piece of a token's sum, and where lane j finds that piece of the token's row j.
struct LocatedPiece {
  uint32_t token;  // kNoItem: none
  uint32_t part;
  TokenRows rows;
  uint32_t bytes;  // in a row

  __device__ LocatedPiece(const BulkCombine& c, const Item& item)
      : token(item.token), part(item.part), rows(locate_rows(c.combine, item.slot)) {
    const uint64_t offset = static_cast<uint64_t>(part) * c.plan.piece_bytes;
    bytes = static_cast<uint32_t>(min(c.combine.pitch - offset, uint64_t{c.plan.piece_bytes}));
    rows.row += offset;
  }
};

struct StagedPiece {
  uint32_t token;
  uint32_t part;
  int32_t rows;
};

// What one warp has in shared memory, and what it knows about it.
class PieceRing {
 public:
  // Before the first use, one call by the whole warp.
  __device__ PieceRing(const BulkCombine& c, uint8_t* stages, BulkBarrier* arrived,
                       StagedPiece* pieces)
      : c_(c), stages_(stages), arrived_(arrived), pieces_(pieces) {
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
  // Lane j brings in row j; in the stage the rows lie in the order of the list. valid: whether the
  // sum may be formed; if not, no row is looked at.
  __device__ void load(int s, const LocatedPiece& piece, bool valid) {
    const int lane = lane_id();
    const int count = valid && piece.token != kNoItem ? piece.rows.count : 0;
    if (lane == 0) {
      pieces_[s] = {piece.token, piece.part, count};
      arrived_[s].expect(static_cast<uint32_t>(count) * piece.bytes);
    }
    if (lane < count) {
      bulk_load(stage(s) + static_cast<uint32_t>(lane) * c_.plan.piece_bytes, piece.rows.row,
                piece.bytes, arrived_[s]);
    }
    __syncwarp();
  }
  // Waits for what `load` has brought; token kNoItem: nothing, nor will later stages have any.
  __device__ StagedPiece wait(int s, uint32_t parity) {
    const StagedPiece piece = pieces_[s];
    if (piece.token != kNoItem) arrived_[s].wait(parity);
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
};

// The sum of a piece of any number of vectors up to seven: a bit of the number each.
template <RowType kType>
struct PieceSum {
  static_assert(kMaxBulkVectors == 4 + 2 + 1);
  VectorSums<kType, 4> four;
  VectorSums<kType, 2> two;
  VectorSums<kType, 1> one;
  uint32_t vectors;
  uint8_t* out;
  int32_t bytes;  // of the output

  __device__ PieceSum(const BulkCombine& c, const uint8_t* stage, StagedPiece piece, bool valid) {
    const int64_t offset = static_cast<int64_t>(piece.part) * c.plan.piece_bytes;
    out = c.combine.output + piece.token * c.combine.row_bytes + offset;
    bytes = static_cast<int32_t>(
        min(c.combine.row_bytes - offset, static_cast<int64_t>(c.plan.piece_bytes)));
    vectors = (static_cast<uint32_t>(bytes) + kVectorBytes - 1) / kVectorBytes;
    if (vectors & 4) four.add(stage, piece.rows, c.plan.piece_bytes, valid);
    if (vectors & 2) two.add(stage + behind_four(), piece.rows, c.plan.piece_bytes, valid);
    if (vectors & 1) one.add(stage + behind_two(), piece.rows, c.plan.piece_bytes, valid);
  }
  __device__ void store(bool is_aligned, uint8_t* scratch) const {
    if (vectors & 4) four.store(out, bytes, is_aligned, scratch);
    if (vectors & 2) store(two, behind_four(), is_aligned, scratch);
    if (vectors & 1) store(one, behind_two(), is_aligned, scratch);
  }

 private:
  __device__ int32_t behind_four() const {
    return static_cast<int32_t>((vectors & 4) * kVectorBytes);
  }
  __device__ int32_t behind_two() const {
    return static_cast<int32_t>((vectors & 6) * kVectorBytes);
  }
  template <typename Sums>
  __device__ void store(const Sums& sums, int32_t at, bool is_aligned, uint8_t* scratch) const {
    sums.store(out + at, bytes - at, is_aligned, scratch);
  }
};

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
template <RowType kType, bool kStaged>
__global__ void __launch_bounds__(kBulkThreads, 1)
    combine_bulk_kernel(const __grid_constant__ BulkCombine c) {
  extern __shared__ __align__(128) uint8_t bulk_stages[];
  __shared__ BulkBarrier arrived[kBulkWarps + 1][kBulkStages];
  __shared__ StagedPiece pieces[kBulkWarps + 1][kBulkStages];
  const CombineKernelParams& p = c.combine;
  const auto warp = threadIdx.x / kWarpSize;
  const uint32_t total = static_cast<uint32_t>(p.num_tokens) * c.plan.parts;
  PieceRing ring(c, bulk_stages + warp * kBulkStages * PieceRing::stage_bytes(c), arrived[warp],
                 pieces[warp]);
  const Share share(total, kBulkWarps, kBulkStages);

  begin_combine<kStaged>(p, c.stage);
  ItemFeed feed(p, total, c.plan.parts, c.plan.by_parts);
  Item first[kBulkStages] = {kNothing, kNothing};
  bool ready = true;
  if (speaks_with_peers()) {
    ready = exchange_flags<kStaged>(p);
  } else if (warp < share.warps) {
    const uint32_t base = feed.take(share.first_items);
#pragma unroll
    for (uint32_t s = 0; s < kBulkStages; ++s) {
      if (s < share.first_items) first[s] = feed.at(base + s);
    }
    if (share.more && base < total) feed.look_ahead();
  }
  static_assert(kBulkStages == 2);
  const LocatedPiece located[kBulkStages] = {{c, first[0]}, {c, first[1]}};
  const bool valid = agree_on_rows(ready);
  if (!valid && has_failed(p.workspace)) fill_with_nan<kType>(p);
  if (warp >= share.warps) return;

  fence_peers_to_bulk();
  ring.load(0, located[0], valid);
  if (share.first_items == kBulkStages) {
    ring.load(1, located[1], valid);
  } else {
    ring.load(1, LocatedPiece(c, feed.next()), valid);
  }
  Item next = feed.next();
  int s = 0;
  for (uint32_t parity = 0;;) {
    const StagedPiece piece = ring.wait(s, parity);
    if (piece.token == kNoItem) break;
    const PieceSum<kType> sum(c, ring.stage(s), piece, valid);
    // What is not aligned goes through the stage: each lane has read what it overwrites there.
    if (!p.output_is_aligned) sum.store(false, ring.stage(s));
    ring.release();
    ring.load(s, LocatedPiece(c, next), valid);
    next = feed.next();
    if (p.output_is_aligned) sum.store(true, nullptr);
    if (++s == kBulkStages) {
      s = 0;
      parity ^= 1;
    }
  }
}

}  // namespace moe_ep::cake
