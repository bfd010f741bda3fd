// What the warps of a combine of FP8 rows share: its parameters, and how rows are cut.
#pragma once

#include <cstdint>

#include "core/fast_divide.h"
#include "core/limits.h"
#include "core/scaled_fp8.h"
#include "one_sided/combine_plan.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/sum_items.cuh"
#include "one_sided/device/token_rows.cuh"
#include "transport/device/share.cuh"

namespace moe_ep::one_sided {

// A piece of a sum, by one warp: kFp8Vectors vectors of 8 elements a lane, which lie as the 16-byte
// chunks of a row of 16-bit elements do. Its scales in each of the rows that are loaded at once are
// a word a lane.
inline constexpr int kFp8Elements = 8;  // of a lane in a vector
inline constexpr int kFp8Vectors = 4;
inline constexpr int kFp8PieceElements = kFp8Vectors * kFp8Elements * kWarpSize;
inline constexpr int kFp8PieceBlocks = kFp8PieceElements / static_cast<int>(kFp8Block);
inline constexpr int kMaxFp8RowsAtOnce = kWarpSize / kFp8PieceBlocks;

// Rows are pushed in parts, each by one warp and with a flag of its own.
struct RowParts {
  uint32_t count;        // of a row
  uint32_t blocks;       // of a scale, in a part
  uint32_t piece_shift;  // a part is 2^piece_shift pieces of a sum
  FastDivider by_count;

  static RowParts of(const Fp8Row& row, uint32_t min_piece_shift) {
    RowParts parts{0, uint32_t{kFp8PieceBlocks} << min_piece_shift, min_piece_shift,
                   FastDivider(1)};
    const auto blocks = static_cast<uint64_t>(row.num_blocks);
    while (divide_up(blocks, parts.blocks) > kMaxRowParts) {
      parts.blocks *= 2;
      ++parts.piece_shift;
    }
    parts.count = static_cast<uint32_t>(divide_up(blocks, parts.blocks));
    parts.by_count = FastDivider(static_cast<int32_t>(parts.count));
    return parts;
  }
};

struct Fp8Combine {
  CombineKernelParams combine;
  Fp8Row row;
  RowParts parts;
  // Sources that rows are pushed to: all, or all but this rank, whose own rows are then summed from
  // where the experts left them.
  uint32_t sources;
  bool sums_own_rows;
  FastDivider by_sources;
  Share pushers;  // among the warps that push first
  SumPlan sums;   // a piece is kFp8PieceElements
  RowBlocks arrived;
  // The outputs may lie where this rank's sums go, or the next rows of a source: a flag and a sum
  // must then follow all reads.
  bool reads_come_first;
  uint32_t early;  // warps of a CTA that sum from the start
};

// Rows from each source, as dispatch has counted them.
class RecvCounts {
 public:
  // By all lanes of a warp.
  __device__ RecvCounts(const CombineKernelParams& p, bool misused)
      : counts_(own_segment(p.workspace).recv_counts()),
        ep_size_(misused ? 0 : p.workspace.ep_size),
        first_(lane_id() < ep_size_ ? counts_[lane_id()] : 0) {}

  __device__ int32_t of(int32_t source) const {
    return source < kWarpSize ? __shfl_sync(kAllLanes, first_, source) : counts_[source];
  }
  __device__ uint32_t most() const {
    int32_t most = first_;
#pragma unroll 1
    for (int32_t source = kWarpSize + lane_id(); source < ep_size_; source += kWarpSize) {
      most = max(most, counts_[source]);
    }
    return static_cast<uint32_t>(__reduce_max_sync(kAllLanes, most));
  }

 private:
  const int32_t* counts_;
  int32_t ep_size_;
  int32_t first_;  // of source `lane`
};

}  // namespace moe_ep::one_sided
