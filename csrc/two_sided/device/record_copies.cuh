// Copies of records between the tensors of a dispatch and slots, by one warp.
#pragma once

#include <cstdint>

#include "core/fast_divide.h"
#include "transport/device/unaligned.cuh"
#include "transport/device/warp.cuh"
#include "two_sided/cuda_params.h"
#include "two_sided/device/borrowed.cuh"

namespace moe_ep::two_sided {

// Of a warp, each 512 bytes: what a slot of 4 KiB holds is loaded at once.
inline constexpr int kChunksInFlight = 8;

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
__device__ inline ChunkPlace place_in(const RecordRows& record, int64_t row, int32_t chunk) {
  const FieldRows* field = &record.fields[0];
#pragma unroll
  for (int32_t i = 1; i < kMaxPayloads; ++i) {
    if (chunk >= record.fields[i].begin) field = &record.fields[i];
  }
  return place_in(*field, row, chunk);
}

__device__ inline uint4 load(const ChunkPlace& place) {
  if (place.is_whole) return load_chunk(place.address);
  return load_unaligned(place.address, place.bytes);
}
__device__ inline void store(const ChunkPlace& place, uint4 chunk) {
  if (place.is_whole) {
    store_chunk(place.address, chunk);
  } else {
    store_unaligned(place.address, chunk, place.bytes);
  }
}

// Moves `count` chunks: loads a batch with from(index), and hands each to to(index, chunk). Between
// the last loads and the stores it calls loaded().
template <typename From, typename To, typename Loaded>
__device__ void move_chunks(int32_t count, const From& from, const To& to, const Loaded& loaded) {
  constexpr int32_t kBatch = kChunksInFlight * kWarpSize;
#pragma unroll 1
  for (int32_t begin = 0; begin < count; begin += kBatch) {
    uint4 chunks[kChunksInFlight];
#pragma unroll
    for (int i = 0; i < kChunksInFlight; ++i) {
      const int32_t index = begin + i * kWarpSize + lane_id();
      if (index < count) chunks[i] = from(index);
    }
    if (begin + kBatch >= count) loaded();
#pragma unroll
    for (int i = 0; i < kChunksInFlight; ++i) {
      const int32_t index = begin + i * kWarpSize + lane_id();
      if (index < count) to(index, chunks[i]);
    }
  }
}
template <typename From, typename To>
__device__ void move_chunks(int32_t count, const From& from, const To& to) {
  move_chunks(count, from, to, [] {});
}

// Which record of a slot a chunk is of.
class SlotChunks {
 public:
  __device__ explicit SlotChunks(const Item& item) : item_(item), by_record_(item.chunks) {}

  __device__ int32_t record(int32_t chunk) const { return by_record_.divide(chunk); }
  // Of its whole record.
  __device__ int32_t in_record(int32_t chunk) const {
    return item_.begin + chunk - record(chunk) * item_.chunks;
  }

 private:
  const Item& item_;
  FastDivider by_record_;
};

}  // namespace moe_ep::two_sided
