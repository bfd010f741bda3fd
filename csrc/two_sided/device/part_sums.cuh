// Sums of a part of a token's rows, by one warp.
#pragma once

#include <cstdint>

#include "transport/device/memory_access.cuh"
#include "transport/device/row_sum.cuh"
#include "transport/device/unaligned.cuh"
#include "transport/device/warp.cuh"
#include "two_sided/cuda_params.h"
#include "two_sided/device/stage.cuh"

namespace moe_ep::two_sided {

// Where the sum goes, and how much of it is here.
struct PartOfSum {
  uint8_t* out;
  int64_t bytes;  // of the part; the last chunk may be cut short
  int32_t chunks;
  bool is_whole;

  __device__ PartOfSum(const CombineKernelParams& p, const Item& item, int32_t token) {
    const int64_t row_bytes = p.expert_rows.row_bytes;
    const int64_t begin = int64_t{16} * item.begin;
    out = p.output + token * row_bytes + begin;
    bytes = min(item.bytes(), row_bytes - begin);
    chunks = item.chunks;
    is_whole = p.output_is_whole;
  }
  __device__ int32_t bytes_of(int32_t chunk) const {
    return static_cast<int32_t>(min(bytes - int64_t{16} * chunk, int64_t{16}));
  }
  __device__ void store(int32_t chunk, uint4 sum) const {
    if (chunk >= chunks) return;
    if (is_whole) {
      store_chunk(out + int64_t{16} * chunk, sum);
    } else {
      store_unaligned(out + int64_t{16} * chunk, sum, bytes_of(chunk));
    }
  }
};

// The chunk of a part that a lane sums, in float32; the next lane has the next one.
template <RowType kType>
struct LaneSum {
  float sum[Chunk<kType>::kElements];
  int32_t chunk;

  __device__ LaneSum(int32_t begin, bool valid) : chunk(begin + lane_id()) { start(sum, valid); }
  __device__ void add(uint4 of_row) { Chunk<kType>::add(sum, of_row); }
  // Adds up to kMost rows, with all loads in flight at once; loaded() is called behind them. Behind
  // the end of the part the last chunk is loaded again.
  template <int kMost, typename Loaded>
  __device__ void add_unaligned(const PartOfSum& part, uint8_t* const* rows, int32_t count,
                                const Loaded& loaded) {
    uint4 chunks[kMost];
    const int32_t there = min(chunk, part.chunks - 1);
#pragma unroll
    for (int r = 0; r < kMost; ++r) {
      if (r >= count) break;
      const uint8_t* const from = rows[r] + int64_t{16} * there;
      chunks[r] = load_unaligned(from, part.bytes_of(there));
    }
    loaded();
#pragma unroll
    for (int r = 0; r < kMost; ++r) {
      if (r >= count) break;
      Chunk<kType>::add(sum, chunks[r]);
    }
  }
  __device__ void store(const PartOfSum& part) const {
    part.store(chunk, Chunk<kType>::round(sum));
  }
};

// Brings the chunks of `count` rows into shared memory, those that one lane adds up one behind the
// other, and as many ahead of the sums as there is room for.
class RowFeed {
 public:
  // shared: this lane's chunks there, kWarpSize apart.
  __device__ RowFeed(const PartOfSum& part, uint8_t* const* rows, int32_t count, uint4* shared)
      : shared_(shared),
        rows_(rows),
        count_(count),
        chunks_(part.chunks),
        chunk_(count > 0 ? lane_id() : part.chunks) {
#pragma unroll
    for (int i = 0; i < kStageVectors; ++i) begin_load(i);
  }
  // The next one that was begun; its place is taken by another.
  template <typename Add>
  __device__ void take(const Add& add) {
    wait_for_groups_of_loads<kStageVectors - 1>();
    const uint32_t place = taken_ % kStageVectors;
    add(shared_[place * kWarpSize]);
    begin_load(place);
    ++taken_;
  }

 private:
  __device__ void begin_load(uint32_t place) {
    if (chunk_ < chunks_) {
      load_to_shared(shared_ + place * kWarpSize, rows_[row_] + int64_t{16} * chunk_);
    }
    end_group_of_loads();
    if (++row_ == count_) {
      row_ = 0;
      chunk_ += kWarpSize;
    }
  }

  uint4* shared_;
  uint8_t* const* rows_;
  int32_t count_;
  int32_t chunks_;
  int32_t chunk_;  // that is loaded next, of row row_
  int32_t row_ = 0;
  uint32_t taken_ = 0;
};

// Where all rows start on 16 bytes and are of whole chunks (those in slots are padded). free() is
// called once nothing of the rows is needed any more.
template <RowType kType, typename Free>
__device__ void sum_whole_part(const PartOfSum& part, uint8_t* const* rows, int32_t count,
                               uint4* shared, const Free& free) {
  RowFeed feed(part, rows, count, shared);
#pragma unroll 1
  for (int32_t begin = 0; begin < part.chunks; begin += kWarpSize) {
    LaneSum<kType> lane(begin, true);
#pragma unroll 1
    for (int32_t row = 0; row + 1 < count; ++row) feed.take([&](uint4 chunk) { lane.add(chunk); });
    const bool is_last = begin + kWarpSize >= part.chunks;
    if (count > 0) {
      feed.take([&](uint4 chunk) {
        if (is_last) free();
        lane.add(chunk);
      });
    } else if (is_last) {
      free();
    }
    lane.store(part);
  }
  wait_for_loads();  // of the empty groups
}

// The same for rows that lie anyhow.
template <RowType kType, typename Free>
__device__ void sum_part(const PartOfSum& part, uint8_t* const* rows, int32_t count,
                         const Free& free) {
  constexpr int kMost = 4;  // rows at once
#pragma unroll 1
  for (int32_t begin = 0; begin < part.chunks; begin += kWarpSize) {
    LaneSum<kType> lane(begin, true);
    int32_t row = 0;
#pragma unroll 1
    do {
      const bool is_last = begin + kWarpSize >= part.chunks && row + kMost >= count;
      lane.template add_unaligned<kMost>(part, rows + row, count - row, [&] {
        if (is_last) free();
      });
      row += kMost;
    } while (row < count);
    lane.store(part);
  }
}

// NaN in its place.
template <RowType kType>
__device__ void poison_part(const PartOfSum& part) {
  for (int32_t begin = 0; begin < part.chunks; begin += kWarpSize) {
    LaneSum<kType>(begin, false).store(part);
  }
}

}  // namespace moe_ep::two_sided
