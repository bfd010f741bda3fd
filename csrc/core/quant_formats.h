// The block-scaled formats that rows of float32 are quantised to, and how: the definition, shared
// by CPU, kernels and tests.
//
//   format   element   elements a scale   scale    stored number
//   MXFP8    e4m3      32                 ue8m0    element * scale
//   MXFP4    e2m1      32                 ue8m0    element * scale
//   NVFP4    e2m1      16                 e4m3     element * scale / scalar_scale
//
// Let `largest` be the largest magnitude of a block.
//
//   MX      scale = the smallest power of two >= 2^-127 with largest <= scale * largest_element
//           element = RNE(x / scale)
//   NVFP4   scale = RNE(scalar_scale * (largest / 6)), saturating at 448
//           element = RNE(x * (scalar_scale / scale)); all zero where the scale rounds to zero
//
// Every operation written here is one IEEE float32 operation, rounded to nearest, subnormals kept.
// (Division by a power of two is the exact product with its inverse.) Elements saturate and keep
// the sign of x, that of zero included.
//
// Why MX scales round up: the OCP specification suggests 2^(floor(log2 largest) - emax) and lets
// the largest elements saturate, by up to 12 % in e4m3 and 25 % in e2m1. The recipes of cuBLAS,
// Transformer Engine, TensorRT-LLM and FlashInfer take the next power of two where that would
// happen, and so do we, by integer arithmetic instead of their approximate reciprocal. Both give
// scales that every consumer of the format understands.
//
// A block that holds an infinity or a NaN gets the scale NaN (ue8m0 0xFF, e4m3 0x7F) and elements
// 0: e2m1 can hold neither, and a poisoned row must stay visible behind the next matrix
// multiplication. A block of zeros has scale code 0. A row whose size is no multiple of the block
// ends in a shorter block; an odd row of e2m1 ends in a zero nibble.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/scale_layout.h"

namespace moe_ep {

// Those of moe_ep.QuantFormat that are computed here; rows in the others are moved as bytes.
enum class QuantFormat : int32_t { kMxfp8 = 0, kMxfp4 = 1, kNvfp4 = 2 };

MOE_EP_HOST_DEVICE constexpr int64_t elements_per_scale(QuantFormat format) {
  return format == QuantFormat::kNvfp4 ? 16 : 32;
}

MOE_EP_HOST_DEVICE constexpr int64_t scales_per_row(QuantFormat format, int64_t hidden_size) {
  return (hidden_size + elements_per_scale(format) - 1) / elements_per_scale(format);
}

// Two e2m1 elements share a byte, the earlier one in the low nibble.
MOE_EP_HOST_DEVICE constexpr int64_t elements_per_byte(QuantFormat format) {
  return format == QuantFormat::kMxfp8 ? 1 : 2;
}

MOE_EP_HOST_DEVICE constexpr int64_t quantized_row_bytes(QuantFormat format, int64_t hidden_size) {
  return (hidden_size + elements_per_byte(format) - 1) / elements_per_byte(format);
}

// Where the quantised rows of a [num_rows, hidden_size] matrix go.
struct QuantizedRows {
  QuantFormat format;
  ScaleLayout layout;
  float scalar_scale;  // of NVFP4: finite and positive. The MX formats have none.
  int64_t num_rows;
  int64_t hidden_size;
  uint8_t* values;  // [num_rows, quantized_row_bytes(format, hidden_size)]
  uint8_t* scales;  // [scale_bytes(layout, num_rows, scales_per_row(format, hidden_size))]
};

}  // namespace moe_ep
