// Copies of parts of records between tensors and slots, by one warp, through a stage of its own in
// shared memory: what is on its way there takes no registers, so that the warp can do something
// else meanwhile.
//
// Most of a part lies in one field whose rows are of whole chunks: then an address is a base and a
// constant. What does not is looked up, chunk by chunk.
#pragma once

#include <cstdint>

#include "transport/device/memory_access.cuh"
#include "transport/device/unaligned.cuh"
#include "transport/device/warp.cuh"
#include "two_sided/cuda_params.h"

namespace moe_ep::two_sided {

// Of a lane: what a slot of 4 KiB holds is on its way at once.
inline constexpr int kStageVectors = 8;
inline constexpr int32_t kStageChunks = kStageVectors * kWarpSize;

// Where a chunk of a row lies.
struct ChunkPlace {
  uint8_t* address;
  int32_t bytes;  // up to 16
  bool is_whole;
};

__device__ inline ChunkPlace place_in(const FieldRows& field, int64_t row, int32_t chunk) {
  const int64_t offset = int64_t{16} * (chunk - field.begin);
  return {field.data + row * field.stride + offset,
          static_cast<int32_t>(min(field.row_bytes - offset, int64_t{16})), field.is_whole};
}

// The fields of a record, of one or of several.
__device__ inline const FieldRows& field_of(const FieldRows& field, int32_t) { return field; }
__device__ inline const FieldRows& field_of(const RecordRows& record, int32_t chunk) {
  const FieldRows* field = &record.fields[0];
#pragma unroll
  for (int32_t i = 1; i < kMaxPayloads; ++i) {
    if (chunk >= record.fields[i].begin) field = &record.fields[i];
  }
  return *field;
}

// Parts of `count` records, of row `row` and those behind it, as they lie in a slot.
template <typename Record>
struct Parts {
  const Record& record;
  const Item& item;
  int64_t row;
  int32_t count;

  __device__ int32_t chunks() const { return count * item.chunks; }
  // How many of the first ones lie one behind the other, on 16 bytes; there may be none.
  __device__ int32_t run() const {
    const FieldRows& field = field_of(record, item.begin);
    if (count != 1 || !field.is_whole) return 0;
    const int64_t left = field.row_bytes / 16 - (item.begin - field.begin);
    return static_cast<int32_t>(min(left, int64_t{item.chunks}));
  }
  __device__ uint8_t* start() const {
    return place_in(field_of(record, item.begin), row, item.begin).address;
  }
  __device__ ChunkPlace place(int32_t index) const {
    const int32_t before = count == 1 ? 0 : index / item.chunks;
    const int32_t chunk = item.begin + index - before * item.chunks;
    return place_in(field_of(record, chunk), row + before, chunk);
  }
};

class Stage {
 public:
  __device__ explicit Stage(uint4* shared) : mine_(shared + lane_id()) {}

  // For other uses: this lane's chunks, kWarpSize apart.
  __device__ uint4* mine() const { return mine_; }

  // Begins to bring the chunks from `begin` on here, as many as there is room for.
  template <typename Record>
  __device__ void load(const Parts<Record>& parts, int32_t begin = 0) const {
    const int32_t run = parts.run();
    load_run(parts.start(), begin, run);
    const int32_t end = min(parts.chunks(), begin + kStageChunks);
    for_each_behind(begin, run, end, [&](int32_t chunk, uint4* mine) {
      const ChunkPlace place = parts.place(chunk);
      if (place.is_whole) {
        load_to_shared(mine, place.address);
      } else {
        *mine = load_unaligned(place.address, place.bytes);
      }
    });
  }
  __device__ void load_slot(const uint8_t* slot, int32_t chunks, int32_t begin = 0) const {
    load_run(slot, begin, chunks);
  }
  // For what this warp has begun to bring here.
  __device__ static void wait() { wait_for_loads(); }

  __device__ void store_slot(uint8_t* slot, int32_t chunks, int32_t begin = 0) const {
    store_run(slot, begin, chunks);
  }
  template <typename Record>
  __device__ void store(const Parts<Record>& parts, int32_t begin = 0) const {
    const int32_t run = parts.run();
    store_run(parts.start(), begin, run);
    const int32_t end = min(parts.chunks(), begin + kStageChunks);
    for_each_behind(begin, run, end, [&](int32_t chunk, const uint4* mine) {
      const ChunkPlace place = parts.place(chunk);
      if (place.is_whole) {
        store_chunk(place.address, *mine);
      } else {
        store_unaligned(place.address, *mine, place.bytes);
      }
    });
  }

 private:
  __device__ void load_run(const uint8_t* from, int32_t begin, int32_t end) const {
    const int32_t first = begin + lane_id();
    from += int64_t{16} * first;
#pragma unroll
    for (int i = 0; i < kStageVectors; ++i) {
      if (first + i * kWarpSize < end) {
        load_to_shared(mine_ + i * kWarpSize, from + i * 16 * kWarpSize);
      }
    }
  }
  __device__ void store_run(uint8_t* to, int32_t begin, int32_t end) const {
    const int32_t first = begin + lane_id();
    to += int64_t{16} * first;
#pragma unroll
    for (int i = 0; i < kStageVectors; ++i) {
      if (first + i * kWarpSize < end) {
        store_chunk(to + i * 16 * kWarpSize, mine_[i * kWarpSize]);
      }
    }
  }
  // Calls visit(chunk, place in shared memory) for this lane's chunks from `run` on.
  template <typename Visit>
  __device__ void for_each_behind(int32_t begin, int32_t run, int32_t end,
                                  const Visit& visit) const {
    const int32_t first = max(run - begin, 0) / kWarpSize * kWarpSize;
#pragma unroll 1
    for (int32_t at = first; begin + at < end; at += kWarpSize) {
      const int32_t chunk = begin + at + lane_id();
      if (chunk >= run && chunk < end) visit(chunk, mine_ + at);
    }
  }

  uint4* mine_;  // this lane's chunks are kWarpSize apart
};

// Calls move(begin) for what does not fit into a stage at once, window by window.
template <typename Move>
__device__ void for_each_further_window(int32_t chunks, const Move& move) {
#pragma unroll 1
  for (int32_t begin = kStageChunks; begin < chunks; begin += kStageChunks) move(begin);
}

}  // namespace moe_ep::two_sided
