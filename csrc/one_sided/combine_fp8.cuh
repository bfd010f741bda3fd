// Combine of rows that travel as scaled FP8, any number of tokens: the expert outputs are quantised
// on their way into the workspace, the sources pull half the bytes and sum the numbers that the
// rows stand for. The sums leave in the rows' own type, or in a block-scaled format.
#pragma once

#include <cstdint>

#include "one_sided/combine_plan.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/combine_enter.cuh"
#include "one_sided/device/fp8_stage.cuh"
#include "one_sided/device/fp8_sums.cuh"
#include "one_sided/device/item_feed.cuh"
#include "one_sided/device/quantize_sums.cuh"
#include "one_sided/device/sum_items.cuh"
#include "one_sided/device/token_rows.cuh"
#include "transport/device/row_sum.cuh"

namespace moe_ep::one_sided {

// Seven warps sum, and one speaks with the peers.
inline constexpr int kFp8Threads = 256;
inline constexpr uint32_t kFp8SumWarps = kFp8Threads / kWarpSize - 1;
// 21 warps with 512 bytes of each row in flight; to be measured.
inline constexpr int kFp8CtasPerSm = 3;

struct Fp8Combine {
  CombineKernelParams combine;
  StagePlan stage;  // its units are the blocks of a scale
  SumPlan plan;     // a piece is kFp8PieceElements
  Fp8Row row;
};

// One vector of a token's sum, as elements of the rows' type; `bytes` are left of the row. Lanes
// have 16 or 32 bytes each.
template <RowType kType>
__device__ void store_vector(uint8_t* to, int32_t bytes, bool is_aligned,
                             const float (&sum)[kFp8Elements], uint4* scratch) {
  if constexpr (kType != RowType::kFloat32) {
    const uint4 chunk = Chunk<kType>::round(sum);
    if (is_aligned) {
      store_aligned_vector(to, bytes, chunk);
    } else {
      store_unaligned_vector<kType>(to, bytes, chunk, scratch);
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      constexpr int kElements = Chunk<kType>::kElements;
      float four[kElements];
#pragma unroll
      for (int i = 0; i < kElements; ++i) four[i] = sum[half * kElements + i];
      const uint4 chunk = Chunk<kType>::round(four);
      const int byte = lane_id() * 32 + half * 16;
      if (is_aligned) {
        if (byte < bytes) store_chunk(to + byte, chunk);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (byte + 4 * i < bytes)
            *reinterpret_cast<uint32_t*>(to + byte + 4 * i) = word_of(chunk, i);
        }
      }
    }
  }
}

__device__ inline int64_t scales_per_sum(const CombineKernelParams& p) {
  return scales_per_row(p.quantized.format, p.hidden_size);
}

// Computed where they are needed: held in registers, they would cost sums that are not quantised.
__device__ inline ScaleRow scales_of_token(const CombineKernelParams& p, int64_t token) {
  return scales_of_row(p.quantized.layout, token, scales_per_sum(p));
}

// By one warp: kFp8PieceElements of a token's sum.
template <RowType kType>
__device__ void store_piece(const CombineKernelParams& p, int64_t token, uint32_t piece,
                            Fp8Sums& sum, uint4* scratch) {
  const int64_t first_vector = static_cast<int64_t>(piece) * kFp8Vectors;
  if (p.output_is_quantized) {
    const ScaleRow scales = scales_of_token(p, token);
#pragma unroll
    for (int v = 0; v < kFp8Vectors; ++v) {
      const int64_t chunk = (first_vector + v) * kWarpSize + lane_id();
      store_quantized_as(p.quantized, token, scales, chunk, sum[v]);
    }
    return;
  }
#pragma unroll
  for (int v = 0; v < kFp8Vectors; ++v) {
    constexpr int64_t kBytes = kWarpSize * kFp8Elements * (16 / Chunk<kType>::kElements);
    const int64_t begin = (first_vector + v) * kBytes;
    const auto bytes = static_cast<int32_t>(max(min(p.row_bytes - begin, kBytes), int64_t{0}));
    store_vector<kType>(p.output + token * p.row_bytes + begin, bytes, p.output_is_aligned, sum[v],
                        scratch);
  }
}

template <RowType kType>
__device__ void sum_fp8_item(const Fp8Combine& c, const Item& item, bool valid, uint4* scratch) {
  const CombineKernelParams& p = c.combine;
  const uint32_t first = item.part * c.plan.pieces_per_item;
  const uint32_t end = min(first + c.plan.pieces_per_item, c.plan.pieces_per_row);
  const TokenRows rows = locate_rows(p, item.slot);
#pragma unroll 1
  for (uint32_t piece = first; piece < end; ++piece) {
    Fp8Sums sum;
#pragma unroll
    for (int v = 0; v < kFp8Vectors; ++v) start(sum[v], valid);
    if (valid) add_fp8_rows(sum, rows, Fp8Place(c.row, piece));
    store_piece<kType>(p, item.token, piece, sum, scratch);
  }
  if (p.output_is_quantized && end == c.plan.pieces_per_row) {
    clear_scales_behind_row(p.quantized, scales_of_token(p, item.token), scales_per_sum(p));
  }
}

template <RowType kType>
__global__ void __launch_bounds__(kFp8Threads, kFp8CtasPerSm)
    combine_fp8_kernel(const __grid_constant__ Fp8Combine c) {
  __shared__ uint4 scratch[kFp8Threads];
  const CombineKernelParams& p = c.combine;
  begin_staged_combine(p, c.stage, [&](int32_t source, uint64_t first, uint32_t count) {
    quantize_blocks<kType>(p, c.stage, c.row.scales_offset, source, first, count);
  });
  const auto clear_padding = [&] {
    if (!p.output_is_quantized) return;
    clear_padding_scales<kFp8SumWarps>(p.quantized, scales_per_sum(p));
  };
  uint4* const own_scratch = scratch + threadIdx.x / kWarpSize * kWarpSize;
  const auto sum = [&](const Item& item, bool valid) {
    sum_fp8_item<kType>(c, item, valid, own_scratch);
  };
  sum_items<kFp8SumWarps, true>(p, c.plan, clear_padding, sum);
}

}  // namespace moe_ep::one_sided
