// Expert outputs as scaled FP8 (core/scaled_fp8.h): how their owner quantises them into its combine
// rows. The bytes are those of one_sided/fp8_rows.cpp: the hardware rounds and saturates as
// core/float_formats.h does.
#pragma once

#include <cstdint>

#include "core/scaled_fp8.h"
#include "one_sided/combine_plan.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/stage_rows.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"
#include "transport/device/row_sum.cuh"

namespace moe_ep::one_sided {

__device__ inline uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t codes;
  asm("{.reg .b16 l,h; cvt.rn.satfinite.e4m3x2.f32 l,%2,%1; cvt.rn.satfinite.e4m3x2.f32 h,%4,%3;"
      " mov.b32 %0,{l,h};}"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}

// What the 16 bytes of a row that one lane has loaded become.
template <RowType kType>
struct Fp8Chunk {
  static constexpr int kElements = Chunk<kType>::kElements;
  static constexpr int kLanes = static_cast<int>(kFp8Block) / kElements;  // that share a scale
  static constexpr int kWords = kElements / 4;

  float scale;
  uint32_t codes[kWords];

  // Of the elements of `chunk` the first `elements` are the row's. By all lanes of a warp.
  __device__ Fp8Chunk(uint4 chunk, int64_t elements) {
    float number[kElements];
    Chunk<kType>::unpack(number, chunk);
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i >= elements) number[i] = 0.0f;
      largest = max(largest, float_bits(number[i]) & kFloatMagnitudeMask);
    }
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      largest = max(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    const Fp8Scale block = fp8_scale_of_block(largest);
    scale = block.scale;
#pragma unroll
    for (int i = 0; i < kElements; ++i) number[i] = __fmul_rn(number[i], block.multiplier);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const float* const n = number + 4 * w;
      codes[w] = block.keep != 0 ? pack_e4m3(n[0], n[1], n[2], n[3]) : 0;
    }
  }
  __device__ void store(uint8_t* to, int64_t elements) const {
    if (elements >= kElements) {
      if constexpr (kWords == 2) *reinterpret_cast<uint2*>(to) = make_uint2(codes[0], codes[1]);
      if constexpr (kWords == 1) *reinterpret_cast<uint32_t*>(to) = codes[0];
      return;
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i < elements) to[i] = static_cast<uint8_t>(codes[i / 4] >> (8 * (i % 4)));
    }
  }
};

// Quantises one warp's item of a StagePlan whose units are the blocks of a scale: blocks [first,
// first + count) of the rows for `source`.
template <RowType kType, bool kAligned>
__device__ void quantize_some_blocks(const CombineKernelParams& p, const StagePlan& plan,
                                     int64_t scales_offset, int32_t source, uint64_t first,
                                     uint32_t count) {
  using Out = Fp8Chunk<kType>;
  constexpr int kInFlight = kAligned ? 4 : 2;       // loads of a lane
  constexpr int kBlocks = kWarpSize / Out::kLanes;  // that a warp loads at once
  constexpr int kElementBytes = 16 / Out::kElements;
  const auto blocks_per_row = static_cast<uint32_t>(plan.units_per_row);
  const int64_t first_row = static_cast<int64_t>(source) * p.tokens_per_rank +
                            static_cast<int64_t>(first / blocks_per_row);
  const auto skipped = static_cast<uint32_t>(first % blocks_per_row);
  const auto my_block = static_cast<uint32_t>(lane_id() / Out::kLanes);
  const int my_elements = lane_id() % Out::kLanes * Out::kElements;
  struct Place {
    int32_t row;
    int32_t block;
    int64_t element;  // of the row
  };
  const auto place_of = [&](uint32_t i) {
    const auto unit = static_cast<int32_t>(skipped + i);
    const int32_t row = plan.by_row.divide(unit);
    const int32_t block = unit - row * plan.units_per_row;
    return Place{row, block, block * kFp8Block + my_elements};
  };
#pragma unroll 1
  for (uint32_t begin = 0; begin < count; begin += kInFlight * kBlocks) {
    uint4 chunk[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      chunk[k] = make_uint4(0, 0, 0, 0);
      const uint32_t i = begin + static_cast<uint32_t>(k * kBlocks) + my_block;
      const Place place = place_of(i);
      const int64_t left = (p.hidden_size - place.element) * kElementBytes;
      if (i >= count || left <= 0) continue;
      const uint8_t* const at = p.expert_output + (first_row + place.row) * p.expert_output_stride +
                                place.element * kElementBytes;
      if constexpr (kAligned) {
        chunk[k] = load_chunk(at);
      } else {
        chunk[k] = load_unaligned(at, static_cast<int32_t>(min(left, int64_t{16})));
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const uint32_t i = begin + static_cast<uint32_t>(k * kBlocks) + my_block;
      const Place place = place_of(i);
      const int64_t elements = i < count ? p.hidden_size - place.element : 0;  // to the row's end
      const Out out(chunk[k], elements);
      uint8_t* const to = own_segment(p.workspace).combine_row(first_row + place.row, p.pitch);
      out.store(to + place.element, elements);
      if (i < count && my_elements == 0) {
        reinterpret_cast<float*>(to + scales_offset)[place.block] = out.scale;
      }
    }
  }
}

template <RowType kType>
__device__ void quantize_blocks(const CombineKernelParams& p, const StagePlan& plan,
                                int64_t scales_offset, int32_t source, uint64_t first,
                                uint32_t count) {
  if (p.expert_output_is_aligned) {
    quantize_some_blocks<kType, true>(p, plan, scales_offset, source, first, count);
  } else {
    quantize_some_blocks<kType, false>(p, plan, scales_offset, source, first, count);
  }
}

}  // namespace moe_ep::one_sided
