// Where the scale of (row, block) lies: row-major, or in the tiles that block-scaled matrix
// multiplications read.
//
//   kLinear         [row][block]
//   kSwizzle128x4   [row / 128][block / 4][row % 32][row / 32 % 4][block % 4]: cuBLAS, tensor cores
//   kSwizzle8x4     [row / 8][block / 4][row % 8][block % 4]: kernels for few rows
//
// The swizzles pad rows to whole tiles and blocks to a multiple of four. Padding bytes are zero.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace moe_ep {

enum class ScaleLayout : int32_t { kLinear = 0, kSwizzle128x4 = 1, kSwizzle8x4 = 2 };

MOE_EP_HOST_DEVICE constexpr int64_t rows_per_scale_tile(ScaleLayout layout) {
  return layout == ScaleLayout::kSwizzle128x4 ? 128 : layout == ScaleLayout::kSwizzle8x4 ? 8 : 1;
}

MOE_EP_HOST_DEVICE constexpr int64_t padded_scale_rows(ScaleLayout layout, int64_t num_rows) {
  const int64_t tile = rows_per_scale_tile(layout);
  return (num_rows + tile - 1) / tile * tile;
}

MOE_EP_HOST_DEVICE constexpr int64_t padded_scale_blocks(ScaleLayout layout, int64_t num_blocks) {
  return layout == ScaleLayout::kLinear ? num_blocks : (num_blocks + 3) / 4 * 4;
}

MOE_EP_HOST_DEVICE constexpr int64_t scale_bytes(ScaleLayout layout, int64_t num_rows,
                                                 int64_t num_blocks) {
  return padded_scale_rows(layout, num_rows) * padded_scale_blocks(layout, num_blocks);
}

// The scales of one row. In every layout they are runs of four bytes at a fixed stride.
struct ScaleRow {
  int64_t first;           // offset of block 0
  int64_t stride_of_four;  // from blocks [0, 4) to blocks [4, 8)

  MOE_EP_HOST_DEVICE constexpr int64_t offset_of(int64_t block) const {
    return first + block / 4 * stride_of_four + block % 4;
  }
};

MOE_EP_HOST_DEVICE constexpr ScaleRow scale_row(ScaleLayout layout, int64_t row,
                                                int64_t num_blocks) {
  if (layout == ScaleLayout::kLinear) return {row * num_blocks, 4};
  const int64_t tile = rows_per_scale_tile(layout);
  const int64_t in_tile = row % tile;
  const int64_t first_tile = (row / tile) * tile * padded_scale_blocks(layout, num_blocks);
  const int64_t place =
      layout == ScaleLayout::kSwizzle128x4 ? in_tile % 32 * 16 + in_tile / 32 * 4 : in_tile * 4;
  return {first_tile + place, tile * 4};
}

}  // namespace moe_ep
