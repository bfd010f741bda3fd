// Bits that the lanes of a warp have in rows, and need in columns: tokens have ranks, ranks tokens.
#pragma once

#include <cstdint>

#include "transport/device/memory_access.cuh"
#include "transport/device/warp.cuh"

namespace moe_ep {

// Of a 32 x 32 matrix of bits, a row a lane: lane i gets column i.
__device__ inline uint32_t transposed(uint32_t row) {
  // Held, or the compiler computes 20 constants of the lane where nobody needs them.
  const uint32_t lane = held(lane_id());
  uint32_t low = 0x0000FFFFu;  // columns whose number lacks the bit `distance`
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, row, distance);
    const bool is_upper = (lane & distance) != 0;
    const uint32_t kept = is_upper ? ~low : low;
    row =
        (row & kept) | (__funnelshift_l(other, other, is_upper ? 32 - distance : distance) & ~kept);
    low ^= low << (distance / 2);
  }
  return row;
}

// transposed, shorter for few columns: ballots need not wait for each other as shuffles do. The
// lanes behind the last column get anything.
__device__ inline uint32_t transposed(uint32_t row, int32_t columns) {
  constexpr int kFew = 8;
  if (columns > kFew) return transposed(row);
  uint32_t column = 0;
#pragma unroll
  for (int i = 0; i < kFew; ++i) {
    if (i == kFew / 2 && columns <= i) break;
    const uint32_t bits = __ballot_sync(kAllLanes, (row >> i) & 1);
    if (lane_id() == i) column = bits;
  }
  return column;
}

}  // namespace moe_ep
