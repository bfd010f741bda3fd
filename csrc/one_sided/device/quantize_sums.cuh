// Sums that leave in a block-scaled format: the lanes that share a scale block agree on its scale.
// The bytes are those of core/quantize_row.h: its functions decide on scales and codes.
#pragma once

#include <cstdint>

#include "core/quantize_row.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/routing.cuh"

namespace moe_ep::one_sided {

// What the elements that one lane has summed become.
template <int kElements, QuantFormat kFormat>
struct QuantizedChunk {
  static constexpr int kLanesPerScale = static_cast<int>(elements_per_scale(kFormat)) / kElements;
  static constexpr int kBytes = static_cast<int>(quantized_row_bytes(kFormat, kElements));
  // No block lies in two pieces.
  static_assert(kWarpSize % kLanesPerScale == 0);

  uint8_t scale;
  uint64_t codes;  // kBytes of them

  __device__ QuantizedChunk(const float (&sum)[kElements], float scalar_scale) : codes(0) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      largest = max(largest, float_bits(sum[i]) & kFloatMagnitudeMask);
    }
#pragma unroll
    for (int distance = 1; distance < kLanesPerScale; distance *= 2) {
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    const BlockScale block = scale_of_block<kFormat>(largest, scalar_scale);
    scale = block.code;
    constexpr int kBits = 8 * kBytes / kElements;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {  // the earlier one in the low nibble
      const uint8_t code =
          encode_element<kFormat>(__fmul_rn(sum[i], block.multiplier)) & block.keep;
      codes |= static_cast<uint64_t>(code) << (kBits * i);
    }
  }
};

// Stores up to kBytes, the low ones first.
template <int kBytes>
__device__ void store_codes(uint8_t* to, uint64_t codes, int64_t bytes) {
  if (bytes >= kBytes && reinterpret_cast<uintptr_t>(to) % kBytes == 0) {
    if constexpr (kBytes == 8) *reinterpret_cast<uint64_t*>(to) = codes;
    if constexpr (kBytes == 4) *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(codes);
    if constexpr (kBytes == 2) *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(codes);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kBytes && i < bytes; ++i) to[i] = static_cast<uint8_t>(codes >> (8 * i));
}

// scale_row, with the layout known where it divides.
__device__ inline ScaleRow scales_of_row(ScaleLayout layout, int64_t row, int64_t num_blocks) {
  switch (layout) {
    case ScaleLayout::kLinear:
      return scale_row(ScaleLayout::kLinear, row, num_blocks);
    case ScaleLayout::kSwizzle128x4:
      return scale_row(ScaleLayout::kSwizzle128x4, row, num_blocks);
    case ScaleLayout::kSwizzle8x4:
      return scale_row(ScaleLayout::kSwizzle8x4, row, num_blocks);
  }
  return {};
}

// By one warp. chunk: which kElements of the token's row this lane has the sum of; those behind the
// row's end may be anything.
template <QuantFormat kFormat, int kElements>
__device__ void store_quantized(const QuantizedRows& out, int64_t token, const ScaleRow& scales,
                                int64_t chunk, float (&sum)[kElements]) {
  using Chunk = QuantizedChunk<kElements, kFormat>;
  const int64_t elements = out.hidden_size - chunk * kElements;  // from here to the row's end
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    if (i >= elements) sum[i] = 0.0f;  // the last block is filled up with zeros
  }
  const Chunk quantized(sum, out.scalar_scale);
  const int64_t row_bytes = quantized_row_bytes(kFormat, out.hidden_size);
  const int64_t byte = chunk * Chunk::kBytes;
  store_codes<Chunk::kBytes>(out.values + token * row_bytes + byte, quantized.codes,
                             row_bytes - byte);
  const int64_t block = chunk / Chunk::kLanesPerScale;
  if (lane_id() % Chunk::kLanesPerScale == 0 && block < scales_per_row(kFormat, out.hidden_size)) {
    out.scales[scales.offset_of(block)] = quantized.scale;
  }
}

// The same, in the format that `out` names.
template <int kElements>
__device__ void store_quantized_as(const QuantizedRows& out, int64_t token, const ScaleRow& scales,
                                   int64_t chunk, float (&sum)[kElements]) {
  switch (out.format) {
    case QuantFormat::kMxfp8:
      return store_quantized<QuantFormat::kMxfp8>(out, token, scales, chunk, sum);
    case QuantFormat::kMxfp4:
      return store_quantized<QuantFormat::kMxfp4>(out, token, scales, chunk, sum);
    case QuantFormat::kNvfp4:
      return store_quantized<QuantFormat::kNvfp4>(out, token, scales, chunk, sum);
  }
}

// The padding behind the scales of one row, by one warp.
__device__ inline void clear_scales_behind_row(const QuantizedRows& out, const ScaleRow& scales,
                                               int64_t num_blocks) {
  const int64_t block = num_blocks + lane_id();
  if (block < padded_scale_blocks(out.layout, num_blocks)) out.scales[scales.offset_of(block)] = 0;
}

// What clear_padding_rows does, by the warps of the grid that sum; they are the first of each CTA.
template <uint32_t kSumWarps>
__device__ void clear_padding_scales(const QuantizedRows& out, int64_t num_blocks) {
  const int64_t padded_blocks = padded_scale_blocks(out.layout, num_blocks);
  const int64_t bytes =
      (padded_scale_rows(out.layout, out.num_rows) - out.num_rows) * padded_blocks;
  constexpr int64_t kThreads = kSumWarps * kWarpSize;
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < bytes; i += gridDim.x * kThreads) {
    const int64_t row = out.num_rows + i / padded_blocks;
    out.scales[scales_of_row(out.layout, row, num_blocks).offset_of(i % padded_blocks)] = 0;
  }
}

}  // namespace moe_ep::one_sided
