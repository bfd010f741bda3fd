// Combine of rows that travel as scaled FP8, any number of tokens: their owner quantises the expert
// outputs on their way into the memory of the source, half the bytes, and that sums the numbers
// that the rows stand for. The sums leave in the rows' own type, or in a block-scaled format.
//
// Some warps push first and sum then, others sum from the start, so that a token is summed while
// later ones are on the link. One warp exchanges the flags of combine_enter.cuh, as in
// combine_push: a sum needs to see them, since a flag says that the owner was called with the same
// type and width.
//
// Rows and row flags of owner p are written by p in its combine and read here in ours. They are
// written again in p's next combine, behind its next dispatch, which waits for this rank's, which
// follows this kernel. Rows to one's own rank go the same way.
//
// The CTAs of a grid need not run together: parts that somebody waits for are taken from a counter
// by warps that wait for nobody, and each CTA has some of these.
#pragma once

#include <cstdint>

#include "one_sided/combine_plan.h"
#include "one_sided/cuda_params.h"
#include "one_sided/device/combine_enter.cuh"
#include "one_sided/device/fp8_push.cuh"
#include "one_sided/device/fp8_round.cuh"
#include "one_sided/device/fp8_sums.cuh"
#include "one_sided/device/item_feed.cuh"
#include "one_sided/device/quantize_sums.cuh"
#include "one_sided/device/rows_read.cuh"
#include "one_sided/device/sum_items.cuh"
#include "one_sided/device/token_rows.cuh"
#include "one_sided/device/warp_roles.cuh"
#include "transport/device/row_sum.cuh"

namespace moe_ep::one_sided {

// Of the warps of a CTA the first sum from the start, the others push first, and the last one
// speaks with the peers; to be measured. With all of them a thread has 96 registers.
inline constexpr uint32_t kFp8EarlyWarps = 8;
inline constexpr uint32_t kFp8PushWarps = 11;
inline constexpr uint32_t kFp8SumWarps = kFp8EarlyWarps + kFp8PushWarps;
inline constexpr int kFp8Threads = static_cast<int>(kFp8SumWarps + 1) * kWarpSize;

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
template <RowType kType, bool kQuantized>
__device__ void store_piece(const CombineKernelParams& p, int64_t token, uint32_t piece,
                            Fp8Sums& sum, uint4* scratch) {
  const int64_t first_vector = static_cast<int64_t>(piece) * kFp8Vectors;
  if constexpr (kQuantized) {
    const ScaleRow scales = scales_of_token(p, token);
#pragma unroll
    for (int v = 0; v < kFp8Vectors; ++v) {
      const int64_t chunk = (first_vector + v) * kWarpSize + lane_id();
      store_quantized_as(p.quantized, token, scales, chunk, sum[v]);
    }
  } else {
#pragma unroll
    for (int v = 0; v < kFp8Vectors; ++v) {
      constexpr int64_t kBytes = kWarpSize * kFp8Elements * (16 / Chunk<kType>::kElements);
      const int64_t begin = (first_vector + v) * kBytes;
      const auto bytes = static_cast<int32_t>(max(min(p.row_bytes - begin, kBytes), int64_t{0}));
      store_vector<kType>(p.output + token * p.row_bytes + begin, bytes, p.output_is_aligned,
                          sum[v], scratch);
    }
  }
}

// Sums one item. False: its rows have not come in time.
template <RowType kType, bool kQuantized, typename Arrived>
__device__ bool sum_fp8_item(const Fp8Combine& c, uint32_t epoch, const Item& item, bool valid,
                             const Arrived& have_arrived, uint4* scratch) {
  const CombineKernelParams& p = c.combine;
  const uint32_t first = item.part * c.sums.pieces_per_item;
  const uint32_t end = min(first + c.sums.pieces_per_item, c.sums.pieces_per_row);
  const TokenRows rows = locate_rows(c.arrived, item.slot);
  // An item lies in one part of its rows.
  valid = valid && await_part(c, epoch, item.slot, rows.count, first >> c.parts.piece_shift);
  have_arrived();
#pragma unroll 1
  for (uint32_t piece = first; piece < end; ++piece) {
    Fp8Sums sum;
#pragma unroll
    for (int v = 0; v < kFp8Vectors; ++v) start(sum[v], valid);
    if (valid) add_fp8_rows(sum, rows, Fp8Place(c.row, piece));
    store_piece<kType, kQuantized>(p, item.token, piece, sum, scratch);
  }
  if (kQuantized && end == c.sums.pieces_per_row) {
    clear_scales_behind_row(p.quantized, scales_of_token(p, item.token), scales_per_sum(p));
  }
  return valid;
}

// By the warp that speaks with the peers: when its rank's flags say that what it received is
// consumed. No rows are behind them.
__device__ inline FlagsAreSet when_flags_are_set(const Fp8Combine& c, const CombineRound& round) {
  const bool later = c.reads_come_first && RecvCounts(c.combine, round.misused()).most() > 0;
  return later ? FlagsAreSet::kLater : FlagsAreSet::kWithoutFence;
}

template <RowType kType, bool kQuantized>
__global__ void __launch_bounds__(kFp8Threads, 1)
    combine_fp8_kernel(const __grid_constant__ Fp8Combine c) {
  __shared__ uint4 scratch[kFp8Threads];
  __shared__ Verdict verdict;
  __shared__ LastWait last_wait;
  const CombineKernelParams& p = c.combine;
  if (threadIdx.x == 0) {
    verdict.init();
    last_wait.init(kFp8SumWarps + 1);
  }
  __syncthreads();
  wait_for_previous_kernel();
  const CombineRound round(p, own_segment(p.workspace).state());
  if (speaks_with_peers()) {
    if (blockIdx.x == 0 && lane_id() == 0) tell_nothing_to_read(p);
    verdict.give(exchange_flags(p, when_flags_are_set(c, round)));
    last_wait.is_over();
    return;
  }

  const auto warp = threadIdx.x / kWarpSize;
  const uint32_t total = c.sums.items.total;
  ItemFeed feed(p, c.sums.items);
  Item item = kNothing;
  const auto take = [&] {
    const uint32_t taken = feed.take(1);
    item = feed.at(taken);
    if (c.sums.share.more && taken < total) feed.look_ahead();
  };
  if (warp < kFp8EarlyWarps) {
    if (warp < c.sums.share.warps) take();
    if constexpr (kQuantized) {
      clear_padding_scales<kFp8EarlyWarps>(p.quantized, scales_per_sum(p));
    }
  } else {
    if (warp - kFp8EarlyWarps < c.pushers.warps) push_rows<kType>(c, round);
    if (c.sums.share.more) take();
  }
  bool valid = verdict.await();
  bool waits = true;
  sum_from(p, c.sums, feed, item, valid, kFp8SumWarps, [&](const Item& one, bool is_last) {
    const auto have_arrived = [&] {
      if (is_last) last_wait.is_over();
      waits = !is_last;
    };
    valid = sum_fp8_item<kType, kQuantized>(c, round.epoch(), one, valid, have_arrived,
                                            scratch + warp * kWarpSize);
  });
  if (waits) last_wait.is_over();
}

}  // namespace moe_ep::one_sided
