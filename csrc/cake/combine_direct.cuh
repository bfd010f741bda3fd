// Combine for few tokens: each warp sums 512 bytes of a token from registers, all its rows in
// flight at once. One flag a peer, then the rows are read where they lie.
#pragma once

#include <cstdint>

#include "cake/combine_plan.h"
#include "cake/cuda_params.h"
#include "cake/device/combine_enter.cuh"
#include "cake/device/memory_access.cuh"
#include "cake/device/row_sum.cuh"
#include "cake/device/token_rows.cuh"

namespace moe_ep::cake {

inline constexpr int kDirectThreads = 256;
// Enough warps for 512 bytes each at kMaxDirectTokens; more would only wait (to be measured).
inline constexpr int kDirectCtasPerSm = 2;
// Registers for one more: a waiting grid must leave room for a peer's kernel on the same GPU.
inline constexpr int kDirectResidentCtas = 3;

struct DirectCombine {
  CombineKernelParams combine;
  StagePlan stage;
  uint32_t pieces_per_row;
};

template <RowType kType>
__global__ void __launch_bounds__(kDirectThreads, kDirectResidentCtas)
    combine_direct_kernel(const __grid_constant__ DirectCombine c) {
  __shared__ StageTable table;
  __shared__ uint4 scratch[kDirectThreads];
  const CombineKernelParams& p = c.combine;
  const auto warp = threadIdx.x / kWarpSize;
  const auto warps = gridDim.x * (kDirectThreads / kWarpSize);
  const uint32_t total = static_cast<uint32_t>(p.num_tokens) * c.pieces_per_row;
  // Neighbours in the list lie on different SMs.
  uint32_t piece = warp * gridDim.x + blockIdx.x;
  const auto slot_of_piece = [&](uint32_t i) {
    if (i >= total) return SendSlot{-1, 0};
    return load_slot(p, static_cast<int32_t>(i / c.pieces_per_row));
  };

  wait_for_previous_kernel();
  SendSlot slot = slot_of_piece(piece);  // flies while the flags do
  const CombineRound round = read_round(p);
  const bool valid = !round.failed && exchange_rows(p, c.stage, round, table);

  while (piece < total) {
    const uint32_t token = piece / c.pieces_per_row;
    const uint64_t begin = static_cast<uint64_t>(piece - token * c.pieces_per_row) * kVectorBytes;
    const TokenRows rows = locate_rows(p, slot, valid);
    piece += warps;
    slot = slot_of_piece(piece);
    // Lanes behind the end of the row read its last chunk.
    const uint64_t last_chunk = p.pitch - kRowAlignment;
    float sum[Chunk<kType>::kElements];
    start(sum, valid);
    add_rows<kType>(sum, rows,
                    min(begin + static_cast<uint64_t>(lane_id()) * kRowAlignment, last_chunk));
    const auto offset = static_cast<int64_t>(begin);
    store_vector<kType>(p.output + static_cast<int64_t>(token) * p.row_bytes + offset,
                        p.row_bytes - offset, Chunk<kType>::round(sum), p.output_is_aligned,
                        scratch + warp * kWarpSize);
  }
}

}  // namespace moe_ep::cake
