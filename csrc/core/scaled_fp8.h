// Rows of scaled FP8: e4m3 elements, and a float32 scale for each block of 128. It is the format
// that moe_ep.QuantFormat calls DeepSeekFp8; how rows are quantised to it is defined here, for CPU,
// kernels and tests.
//
// Let `largest` be the largest magnitude of a block, but at least 2^-100.
//
//   scale    = largest * (1 / 448), rounded up to 20 significant bits
//   element  = RNE(x * (1 / scale))
//   number   = element * scale
//
// Every operation written here is one IEEE float32 operation, rounded to nearest. Elements saturate
// and keep the sign of x, that of zero included. With 4 bits of an element and 20 of a scale, the
// product of the two is exact: a sum of such products has the same bits with fused multiply-add as
// without. The bound of 2^-100 keeps scales, their inverses and all products normal; what
// x * (1 / scale) underflows to rounds to zero in e4m3 all the same. The scale is capped so that
// 448 * scale is finite: only magnitudes within 2^-19 of the largest float32 are affected.
//
// A block that holds an infinity or a NaN gets the scale NaN and elements 0, as the formats of
// quant_formats.h do: all its numbers are NaN. A row whose size is no multiple of 128 ends in a
// shorter block.
#pragma once

#include <cstdint>

#include "core/float_formats.h"
#include "core/host_device.h"
#include "core/workspace_layout.h"

namespace moe_ep {

inline constexpr int64_t kFp8Block = 128;  // elements of a scale

// A row in memory: hidden_size elements from its start, the scales behind them, on a cache line of
// their own where the pitch has room for that, else at its end. So both are aligned whatever the
// hidden size.
struct Fp8Row {
  int64_t num_blocks;
  int64_t bytes;          // of elements and scales
  uint64_t pitch;         // from one row to the next
  int64_t scales_offset;  // from the row's start; a multiple of 4

  MOE_EP_HOST_DEVICE static constexpr Fp8Row of(int64_t hidden_size) {
    Fp8Row row{};
    row.num_blocks = (hidden_size + kFp8Block - 1) / kFp8Block;
    const int64_t scale_bytes = row.num_blocks * static_cast<int64_t>(sizeof(float));
    row.bytes = hidden_size + scale_bytes;
    row.pitch = row_pitch_in_lines(row.bytes);
    const int64_t last = static_cast<int64_t>(row.pitch) - scale_bytes;
    const int64_t line = last - last % static_cast<int64_t>(kRegionAlignment);
    row.scales_offset = line >= hidden_size ? line : last;
    return row;
  }
};

// How the elements of one block become codes: code(x) = float_to_e4m3(x * multiplier) & keep.
struct Fp8Scale {
  float scale;  // what is stored
  float multiplier;
  uint8_t keep;  // 0 in a block with an infinity or NaN, else 0xFF
};

// The scale of a block of finite numbers. largest: their largest magnitude as float bits, which
// order like the numbers, with infinity and NaN on top; of these the scale of a finite block, too.
// The result and its reciprocal are normal.
MOE_EP_HOST_DEVICE constexpr float fp8_finite_scale(uint32_t largest) {
  constexpr float kLargestElement = 448.0f;
  constexpr float kLargestFloat = 0x1.FFFFFEp127f;
  constexpr uint32_t kSmallest = float_bits(0x1p-100f);
  constexpr uint32_t kDroppedBits = 0xF;
  constexpr uint32_t kLargestScale = float_bits(kLargestFloat / kLargestElement) & ~kDroppedBits;
  const bool finite = largest < kFloatInfinityBits;
  const uint32_t bounded = select(finite && largest > kSmallest, largest, kSmallest);
  const uint32_t exact = float_bits(float_from_bits(bounded) * (1.0f / kLargestElement));
  const uint32_t rounded_up = (exact + kDroppedBits) & ~kDroppedBits;
  return float_from_bits(select(rounded_up < kLargestScale, rounded_up, kLargestScale));
}

// finite_scale: as above; inverse: 1 / finite_scale.
MOE_EP_HOST_DEVICE constexpr Fp8Scale fp8_scale_of_block(uint32_t largest, float finite_scale,
                                                         float inverse) {
  const bool finite = largest < kFloatInfinityBits;
  return {float_from_bits(select(finite, float_bits(finite_scale), kFloat32Nan)), inverse,
          static_cast<uint8_t>(finite ? 0xFF : 0)};
}
MOE_EP_HOST_DEVICE constexpr Fp8Scale fp8_scale_of_block(uint32_t largest) {
  const float scale = fp8_finite_scale(largest);
  return fp8_scale_of_block(largest, scale, 1.0f / scale);
}

// Quantises the kFp8Block floats at `block`; returns their scale.
MOE_EP_HOST_DEVICE constexpr float quantize_fp8_block(const float* block, uint8_t* codes) {
  int32_t largest = 0;
  for (int i = 0; i < kFp8Block; ++i) {
    const auto magnitude = static_cast<int32_t>(float_bits(block[i]) & kFloatMagnitudeMask);
    largest = magnitude > largest ? magnitude : largest;
  }
  const Fp8Scale scale = fp8_scale_of_block(static_cast<uint32_t>(largest));
  for (int i = 0; i < kFp8Block; ++i) {
    codes[i] = float_to_e4m3(block[i] * scale.multiplier) & scale.keep;
  }
  return scale.scale;
}

}  // namespace moe_ep
