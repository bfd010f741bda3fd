// Combine with sums in a block-scaled format. A warp sums 512 bytes of a token's rows as
// combine_direct does, any number of tokens; the lanes that share a scale block agree on its
// scale. The bytes are those of core/quantize_row.h: its functions decide on scales and codes.
#pragma once

#include <cstdint>

#include "cake/combine_plan.h"
#include "cake/cuda_params.h"
#include "cake/device/combine_enter.cuh"
#include "cake/device/item_feed.cuh"
#include "cake/device/memory_access.cuh"
#include "cake/device/row_sum.cuh"
#include "cake/device/token_rows.cuh"
#include "core/fast_divide.h"
#include "core/quantize_row.h"

namespace moe_ep::cake {

// Seven warps sum, and one speaks with the peers.
inline constexpr int kQuantizedThreads = 256;
inline constexpr uint32_t kQuantizedSumWarps = kQuantizedThreads / kWarpSize - 1;
inline constexpr int kQuantizedCtasPerSm = 2;  // to be measured

struct QuantizedPlan {
  uint32_t pieces_per_row;  // of 512 bytes of the rows that are summed
  uint32_t pieces_per_item;
  uint32_t items_per_row;
  FastDivider by_items_per_row;
};

struct QuantizedCombine {
  CombineKernelParams combine;
  StagePlan stage;
  QuantizedPlan plan;
};

// What the 16 bytes of a row that one lane sums become.
template <RowType kType, QuantFormat kFormat>
struct QuantizedChunk {
  static constexpr int kElements = Chunk<kType>::kElements;
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

// What clear_padding_rows does, by the warps of the grid that sum.
template <QuantFormat kFormat>
__device__ void clear_padding_scales(const QuantizedRows& out) {
  const int64_t num_blocks = scales_per_row(kFormat, out.hidden_size);
  const int64_t padded_blocks = padded_scale_blocks(out.layout, num_blocks);
  const int64_t bytes =
      (padded_scale_rows(out.layout, out.num_rows) - out.num_rows) * padded_blocks;
  constexpr int64_t kThreads = kQuantizedSumWarps * kWarpSize;
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < bytes; i += gridDim.x * kThreads) {
    const int64_t row = out.num_rows + i / padded_blocks;
    out.scales[scales_of_row(out.layout, row, num_blocks).offset_of(i % padded_blocks)] = 0;
  }
}

// By one warp: 512 bytes of a token's rows.
template <RowType kType, QuantFormat kFormat>
__device__ void quantize_piece(const CombineKernelParams& p, const TokenRows& rows, bool valid,
                               int64_t token, const ScaleRow& scales, uint32_t piece) {
  using Out = QuantizedChunk<kType, kFormat>;
  const QuantizedRows& out = p.quantized;
  const int64_t chunk = static_cast<int64_t>(piece) * kWarpSize + lane_id();
  const int64_t elements = p.hidden_size - chunk * Out::kElements;  // from here to the row's end
  // Lanes behind the end of the row read its last chunk.
  const uint64_t last_chunk = p.pitch - kRowAlignment;
  float sum[Out::kElements];
  start(sum, valid);
  const uint64_t offset = min(static_cast<uint64_t>(chunk) * kRowAlignment, last_chunk);
  if (valid) add_rows<kType>(sum, rows, offset);
#pragma unroll
  for (int i = 0; i < Out::kElements; ++i) {
    if (i >= elements) sum[i] = 0.0f;  // the last block is filled up with zeros
  }
  const Out quantized(sum, out.scalar_scale);
  const int64_t row_bytes = quantized_row_bytes(kFormat, p.hidden_size);
  const int64_t byte = chunk * Out::kBytes;
  store_codes<Out::kBytes>(out.values + token * row_bytes + byte, quantized.codes,
                           row_bytes - byte);
  const int64_t num_blocks = scales_per_row(kFormat, p.hidden_size);
  const int64_t block = chunk / Out::kLanesPerScale;
  if (lane_id() % Out::kLanesPerScale == 0 && block < num_blocks) {
    out.scales[scales.offset_of(block)] = quantized.scale;
  }
}

template <RowType kType, QuantFormat kFormat>
__device__ void quantize_item(const QuantizedCombine& c, const Item& item, bool valid) {
  const CombineKernelParams& p = c.combine;
  const uint32_t first = item.part * c.plan.pieces_per_item;
  const uint32_t end = min(first + c.plan.pieces_per_item, c.plan.pieces_per_row);
  const int64_t num_blocks = scales_per_row(kFormat, p.hidden_size);
  const ScaleRow scales = scales_of_row(p.quantized.layout, item.token, num_blocks);
  const TokenRows rows = locate_rows(p, item.slot);
  for (uint32_t piece = first; piece < end; ++piece) {
    quantize_piece<kType, kFormat>(p, rows, valid, item.token, scales, piece);
  }
  if (end == c.plan.pieces_per_row) {
    const int64_t block = num_blocks + lane_id();  // the padding behind the row's scales
    if (block < padded_scale_blocks(p.quantized.layout, num_blocks)) {
      p.quantized.scales[scales.offset_of(block)] = 0;
    }
  }
}

template <RowType kType, QuantFormat kFormat, bool kStaged>
__global__ void __launch_bounds__(kQuantizedThreads, kQuantizedCtasPerSm)
    combine_quantized_kernel(const __grid_constant__ QuantizedCombine c) {
  const CombineKernelParams& p = c.combine;
  const QuantizedPlan& plan = c.plan;
  const auto warp = threadIdx.x / kWarpSize;
  const ItemPlan items(p, plan.items_per_row, plan.by_items_per_row);
  const uint32_t total = items.total;
  const Share share(total, gridDim.x, kQuantizedSumWarps, 1);

  begin_combine<kStaged>(p, c.stage);
  ItemFeed feed(p, items);
  Item item = kNothing;
  bool ready = true;
  if (speaks_with_peers()) {
    ready = exchange_flags<kStaged>(p);
  } else {
    if (warp < share.warps) {
      const uint32_t taken = feed.take(1);
      item = feed.at(taken);
      if (share.more && taken < total) feed.look_ahead();
    }
    clear_padding_scales<kFormat>(p.quantized);
  }
  const bool valid = agree_on_rows(ready);
  // After a failure the counter may not have been reset: then each warp has a fixed share, too.
  uint32_t fixed = total;
  if (!valid && has_failed(p.workspace)) fixed = warp * gridDim.x + blockIdx.x;
  while (fixed < total || item.token != kNoItem) {
    Item current = item;
    if (fixed < total) {
      const uint32_t token = fixed / plan.items_per_row;
      current = {token, fixed - token * plan.items_per_row, {-1, 0}};
      fixed += kQuantizedThreads / kWarpSize * gridDim.x;
    } else {
      item = feed.next();
    }
    quantize_item<kType, kFormat>(c, current, valid);
  }
}

}  // namespace moe_ep::cake
