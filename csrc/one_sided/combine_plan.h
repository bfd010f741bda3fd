// How a combine is cut into pieces of work: what the launchers compute and the kernels read. Grids
// are sized by tokens_per_rank, so that a rank without tokens has CTAs to publish rows with.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/fast_divide.h"
#include "core/limits.h"
#include "one_sided/cuda_params.h"

namespace moe_ep::one_sided {

// One access of a warp: 32 lanes with 16 bytes each.
inline constexpr uint32_t kVectorBytes = 512;
// Items are counted in 31 bits, which FastDivider divides. Every warp that finds none left has
// counted one more, or as many as a first grab takes: this much is kept free for them.
inline constexpr uint64_t kMaxItems = (uint64_t{1} << 31) - (uint64_t{1} << 20);
inline constexpr uint64_t kMaxPitch = uint64_t{1} << 34;

constexpr uint64_t divide_up(uint64_t dividend, uint64_t divisor) {
  return (dividend + divisor - 1) / divisor;
}

inline uint64_t tokens_per_rank(const CombineKernelParams& p) {
  return static_cast<uint64_t>(p.tokens_per_rank);
}

inline uint32_t vectors_per_row(const CombineKernelParams& p) {
  return static_cast<uint32_t>(divide_up(p.pitch, kVectorBytes));
}

// Bringing the expert outputs into the workspace, where that is needed. The rows of one source's
// block are one run of 16-byte chunks; an item is so many of them.
struct StagePlan {
  int32_t chunks_per_row;
  uint32_t item_shift;  // an item is 2^item_shift chunks
  FastDivider by_row;

  static StagePlan of(const CombineKernelParams& p, uint32_t min_item_shift) {
    const auto chunks = static_cast<int32_t>(p.pitch / kRowAlignment);
    StagePlan plan{chunks, min_item_shift, FastDivider(std::max(chunks, 1))};
    while (plan.max_items(p) > kMaxItems / 2) ++plan.item_shift;
    return plan;
  }
  // If all rows have tokens. A block without rows is an item, too: it is published.
  uint64_t max_items(const CombineKernelParams& p) const {
    if (p.expert_output == nullptr) return 0;
    const uint64_t chunks = tokens_per_rank(p) * static_cast<uint64_t>(chunks_per_row);
    return static_cast<uint64_t>(p.workspace.ep_size) *
           std::max<uint64_t>(1, divide_up(chunks, uint64_t{1} << item_shift));
  }
};

// Whether expert outputs lie where this rank's sums go, or the next rows of a source: flags and
// sums must then follow all reads.
inline bool reads_come_first(const CombineKernelParams& p) {
  const DeviceWorkspace& w = p.workspace;
  const int64_t rows = static_cast<int64_t>(w.ep_size) * p.tokens_per_rank;
  const uint8_t* const end =
      p.expert_output + std::max<int64_t>(rows - 1, 0) * p.expert_output_stride + p.row_bytes;
  const auto meets = [&](const uint8_t* begin, int64_t bytes) {
    return p.expert_output < begin + bytes && begin < end;
  };
  const int64_t workspace =
      (w.ep_size - 1) * w.rank_stride + static_cast<int64_t>(w.layout.segment_bytes);
  return meets(w.base, workspace) ||
         (p.output != nullptr && meets(p.output, p.num_tokens * p.row_bytes));
}

// Where the rows are of which a kernel is made that pulls.
enum class PulledRows {
  kInPlace,
  // In a tensor of the user's: they are copied into the workspace first. A kernel of its own, so
  // that the other one is short: 1 us is some 370 instructions of a warp.
  kStaged,
  kEither,  // one kernel for both, where it is not worth two
};

// CTAs for so many pieces of work, each for one warp.
inline int ctas_for(uint64_t warps, int warps_per_cta, int max_ctas) {
  const uint64_t wanted = divide_up(warps, static_cast<uint64_t>(warps_per_cta));
  return static_cast<int>(std::clamp<uint64_t>(wanted, 1, static_cast<uint64_t>(max_ctas)));
}

}  // namespace moe_ep::one_sided
