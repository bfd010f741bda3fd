// The sends of a combine of FP8 rows: their owner quantises them on their way to the source, from
// where the experts left them, through registers, into the source's memory. One pass, and nothing
// waits for it but the flags behind the parts.
//
// Parts are taken from a counter, so that any running CTA can do all of them: sources wait for
// them, and the CTAs of a grid need not run together. First rows come first, of all sources in
// turn.
#pragma once

#include <cstdint>

#include "core/device_signal.cuh"
#include "one_sided/cuda_params.h"
#include "one_sided/device/combine_enter.cuh"
#include "one_sided/device/fp8_chunk.cuh"
#include "one_sided/device/fp8_round.cuh"
#include "one_sided/device/routing.cuh"
#include "one_sided/device/workspace.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::one_sided {

// A part of a row that may have a token.
template <RowType kType>
struct Fp8Part {
  static constexpr int kElements = Chunk<kType>::kElements;     // of a lane's chunk
  static constexpr int kChunkElements = kElements * kWarpSize;  // of a warp's

  bool has_token;
  const uint8_t* from;  // this lane's first 16 bytes, where the experts left them
  uint8_t* to;          // where they go as codes
  float* scales;        // where those of the part go
  int32_t elements;     // of the part
  uint32_t* flag;       // at the source
  Reach reach;

  __device__ static Fp8Part of(const Fp8Combine& c, const RecvCounts& counts, uint32_t index) {
    const CombineKernelParams& p = c.combine;
    const DeviceWorkspace& w = p.workspace;
    const int32_t part_of_any = c.by_sources.divide(static_cast<int32_t>(index));
    // The next rank first and one's own last, so that not all send to the same one.
    const auto behind = static_cast<int32_t>(index) - part_of_any * static_cast<int32_t>(c.sources);
    int32_t source = w.ep_rank + 1 + behind;
    if (source >= w.ep_size) source -= w.ep_size;
    const int32_t row = c.parts.by_count.divide(part_of_any);
    const int32_t number = part_of_any - row * static_cast<int32_t>(c.parts.count);
    const auto first_block = static_cast<int64_t>(number) * c.parts.blocks;
    const int64_t first = first_block * kFp8Block;
    constexpr int64_t kElementBytes = 16 / kElements;
    const DeviceSegment there(w, source);
    const int64_t sent = static_cast<int64_t>(w.ep_rank) * p.tokens_per_rank + row;
    uint8_t* const to = there.combine_row(sent, p.pitch);
    return {
        .has_token = row < counts.of(source),
        .from = p.expert_output +
                (static_cast<int64_t>(source) * p.tokens_per_rank + row) * p.expert_output_stride +
                first * kElementBytes + lane_id() * 16,
        .to = to + first + lane_id() * kElements,
        .scales = reinterpret_cast<float*>(to + c.row.scales_offset) + first_block,
        .elements = static_cast<int32_t>(
            min(p.hidden_size - first, static_cast<int64_t>(c.parts.blocks) * kFp8Block)),
        .flag = there.row_flags(sent) + number,
        .reach = source == w.ep_rank ? Reach::kGpu : w.reach};
  }
  __device__ uint32_t chunks() const {
    return static_cast<uint32_t>(elements + kChunkElements - 1) / kChunkElements;
  }
  __device__ uint32_t blocks() const {
    return (static_cast<uint32_t>(elements) + kFp8Block - 1) / kFp8Block;
  }
  // Of a chunk of the warp's, from this lane's first on. Negative behind the end.
  __device__ int32_t elements_from(uint32_t chunk) const {
    return elements - static_cast<int32_t>(chunk) * kChunkElements - lane_id() * kElements;
  }
};

// Loads of a lane that are in flight together. As many are under way while these are quantised.
template <bool kAligned>
inline constexpr int kFp8InFlight = kAligned ? 4 : 2;

template <RowType kType, bool kAligned>
__device__ void load_chunks(const Fp8Part<kType>& part, uint32_t first,
                            uint4 (&chunk)[kFp8InFlight<kAligned>]) {
#pragma unroll
  for (int k = 0; k < kFp8InFlight<kAligned>; ++k) {
    const uint32_t number = first + static_cast<uint32_t>(k);
    const uint8_t* const at = part.from + number * uint32_t{kVectorBytes};
    const int32_t elements = part.elements_from(number);
    chunk[k] = make_uint4(0, 0, 0, 0);
    if (elements <= 0) continue;
    if constexpr (kAligned) {
      chunk[k] = load_chunk(at);
    } else {
      constexpr int kElementBytes = 16 / Chunk<kType>::kElements;
      chunk[k] = load_unaligned(at, min(elements, Chunk<kType>::kElements) * kElementBytes);
    }
  }
}

// Quantises a part, whose first chunks are `ahead`. Stores whole cache lines where it can.
template <RowType kType, bool kAligned>
__device__ void quantize_part(const Fp8Part<kType>& part, uint4 (&ahead)[kFp8InFlight<kAligned>]) {
  constexpr int kInFlight = kFp8InFlight<kAligned>;
  using Part = Fp8Part<kType>;
  using Out = Fp8Chunks<kType, kInFlight>;
  constexpr uint32_t kBlocks = kWarpSize / Out::kLanes;     // of a chunk of the warp
  constexpr uint32_t kChunksPerLine = kWarpSize / kBlocks;  // whose scales are a word a lane
  static_assert(kChunksPerLine % kInFlight == 0);
  const auto lane = static_cast<uint32_t>(lane_id());
  const uint32_t chunks = part.chunks();
  const uint32_t blocks = part.blocks();
  float scale = 0.0f;  // of block `lane` of the line
#pragma unroll 1
  for (uint32_t first = 0; first < chunks; first += kInFlight) {
    const uint32_t end = first + kInFlight;
    const Out out(ahead);
    if (end < chunks) load_chunks<kType, kAligned>(part, end, ahead);
    uint8_t* const to = part.to + first * Part::kChunkElements;
    if (end * Part::kChunkElements <= static_cast<uint32_t>(part.elements)) {
      Out::for_each([&](int c) { out.store_whole(c, to + c * Part::kChunkElements); });
    } else {
      Out::for_each([&](int c) {
        const int32_t elements = part.elements_from(first + static_cast<uint32_t>(c));
        out.store(c, to + c * Part::kChunkElements, elements);
      });
    }
    Out::for_each([&](int c) {
      const float of_block = __shfl_sync(kAllLanes, out.scale[c], lane % kBlocks * Out::kLanes);
      const uint32_t number = first + static_cast<uint32_t>(c);
      if (lane / kBlocks == number % kChunksPerLine) scale = of_block;
    });
    if (end % kChunksPerLine == 0 || end >= chunks) {
      const uint32_t block = first / kChunksPerLine * kWarpSize + lane;
      if (block < blocks) part.scales[block] = scale;
    }
  }
}

// By warps that push, of every CTA; returns when no part is left to take. Where flags follow reads,
// the warp that is the last to have read its part sets them.
template <RowType kType, bool kAligned>
__device__ void push_parts(const Fp8Combine& c, const CombineRound& round) {
  const CombineKernelParams& p = c.combine;
  DeviceState* const state = own_segment(p.workspace).state();
  const ItemCounter counter(&state->stage_items);
  const auto take = [&] { return lane_id() == 0 ? counter.take(1) : 0u; };
  uint32_t taken = take();  // in flight while the rows are counted
  const RecvCounts counts(p, round.misused());
  const uint32_t total = counts.most() * c.parts.count * c.sources;
  // With few parts a warp takes one when it is free; with many it takes the next one early.
  const bool early = total > gridDim.x * c.pushers.warps;
  struct {
    bool exists;
    bool has_token;
    uint32_t* flag;
    Reach reach;
  } last{};
  const auto publish = [&] {
    if (!last.exists) return;
    __syncwarp();  // lane 0 speaks for what the other lanes have read and stored
    if (lane_id() == 0 && last.has_token) signal_store(last.flag, round.epoch(), last.reach);
    if (c.reads_come_first) publish_when_read(p, round, total);
    last.exists = false;
  };
  for (;;) {
    const uint32_t index = __shfl_sync(kAllLanes, taken, 0);
    const bool exists = index < total;
    if (exists && early) taken = take();
    const auto part = Fp8Part<kType>::of(c, counts, exists ? index : 0);
    const bool has_token = exists && part.has_token;
    uint4 ahead[kFp8InFlight<kAligned>];
    if (has_token) load_chunks<kType, kAligned>(part, 0, ahead);
    publish();  // its stores have had some time, and the loads take as long as the fence
    if (!exists) return;
    if (has_token) quantize_part<kType, kAligned>(part, ahead);
    last = {true, has_token, part.flag, part.reach};
    if (!early) {
      publish();
      taken = take();
    }
  }
}

template <RowType kType>
__device__ void push_rows(const Fp8Combine& c, const CombineRound& round) {
  if (__any_sync(kAllLanes, round.failed())) return;  // it may be set at this moment
  if (c.combine.expert_output_is_aligned) {
    push_parts<kType, true>(c, round);
  } else {
    push_parts<kType, false>(c, round);
  }
}

}  // namespace moe_ep::one_sided
