// Combine for few tokens: each warp sums 512 bytes of a token from registers, all its rows in
// flight at once. One flag a peer, then the rows are read where they lie.
#pragma once

#include <cstdint>

#include "core/fast_divide.h"
#include "one_sided/combine_plan.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/combine_enter.cuh"
#include "one_sided/device/fp8_sum.cuh"
#include "one_sided/device/rows_read.cuh"
#include "one_sided/device/token_rows.cuh"
#include "transport/device/memory_access.cuh"
#include "transport/device/row_sum.cuh"

namespace moe_ep::one_sided {

// Seven warps sum, and one speaks with the peers.
inline constexpr int kDirectThreads = 256;
inline constexpr uint32_t kDirectSumWarps = kDirectThreads / kWarpSize - 1;
// More warps have more loads in flight. EP8, 32 tokens, with 16 warps an SM: each had three or four
// pieces one after the other, and they took 12 us where memory takes 5. To be measured: 21 warps.
template <PulledRows kRows>
inline constexpr int kDirectCtasPerSm =
    kRows == PulledRows::kStaged ? 2 : 3;  // staging takes more registers
// Registers for one more: a waiting grid must leave room for a peer's kernel on the same GPU.
template <PulledRows kRows>
inline constexpr int kDirectResidentCtas = kDirectCtasPerSm<kRows> + 1;

struct DirectCombine {
  CombineKernelParams combine;
  StagePlan stage;
  uint32_t pieces_per_row;
  FastDivider by_row;
};

// 512 bytes of a token's sum. All but the slot is known before the kernel begins, and nothing waits
// for a peer: its addresses are there when the flags are.
struct DirectPiece {
  TokenRows rows;
  uint64_t offset;  // of this lane in a row
  uint8_t* out;
  int32_t bytes;  // of the row, from here

  __device__ void find(const DirectCombine& c, uint32_t piece, SendSlot slot) {
    const CombineKernelParams& p = c.combine;
    const int32_t token = c.by_row.divide(static_cast<int32_t>(piece));
    const uint32_t in_row = piece - static_cast<uint32_t>(token) * c.pieces_per_row;
    const uint64_t begin = static_cast<uint64_t>(in_row) * kVectorBytes;
    // Lanes behind the end of the row read its last chunk.
    offset = min(begin + static_cast<uint64_t>(lane_id()) * kRowAlignment, p.pitch - kRowAlignment);
    bytes = static_cast<int32_t>(
        min(p.row_bytes - static_cast<int64_t>(begin), static_cast<int64_t>(kVectorBytes)));
    out = p.output + token * p.row_bytes + static_cast<int64_t>(begin);
    rows = locate_rows(p, slot);
  }
};

template <RowType kType, bool kAsFp8>
__device__ void sum_piece(const CombineKernelParams& p, const DirectPiece& piece, bool valid,
                          uint4* scratch) {
  float sum[Chunk<kType>::kElements];
  start(sum, valid);
  if constexpr (kAsFp8) {
    const int32_t bytes = piece.bytes - lane_id() * static_cast<int32_t>(kRowAlignment);
    if (valid) add_rows_as_fp8<kType>(sum, piece.rows, piece.offset, bytes);
  } else {
    if (valid) add_rows<kType>(sum, piece.rows, piece.offset);
  }
  store_rounded<kType>(piece.out, piece.bytes, p.output_is_aligned, Chunk<kType>::round(sum),
                       scratch);
}

// kAsFp8: the rows are summed as if they had travelled as FP8.
template <RowType kType, PulledRows kRows, bool kAsFp8>
__global__ void __launch_bounds__(kDirectThreads, kDirectResidentCtas<kRows>)
    combine_direct_kernel(const __grid_constant__ DirectCombine c) {
  __shared__ uint4 scratch[kDirectThreads];
  const CombineKernelParams& p = c.combine;
  const auto warp = threadIdx.x / kWarpSize;
  const auto warps = gridDim.x * kDirectSumWarps;
  const uint32_t total = static_cast<uint32_t>(p.num_tokens) * c.pieces_per_row;
  // Neighbours in the list lie on different SMs.
  uint32_t piece = speaks_with_peers() ? total : warp * gridDim.x + blockIdx.x;
  const auto slot_of = [&](uint32_t i) {
    if (i >= total) return SendSlot{-1, 0};
    return load_slot(p, slot_address(p, c.by_row.divide(static_cast<int32_t>(i))));
  };

  begin_combine<kRows>(p, c.stage);
  bool ready = true;
  DirectPiece work;
  SendSlot next_slot;
  if (speaks_with_peers()) {
    ready = exchange_flags<kRows>(p);
  } else {
    work.find(c, piece, slot_of(piece));
    next_slot = slot_of(piece + warps);
  }
  const bool valid = agree_on_rows(ready);

  while (piece < total) {
    sum_piece<kType, kAsFp8>(p, work, valid, scratch + warp * kWarpSize);
    piece += warps;
    work.find(c, piece, next_slot);
    next_slot = slot_of(piece + warps);
  }
  tell_rows_read(p);
}

}  // namespace moe_ep::one_sided
