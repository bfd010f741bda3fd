// Copies of parts of records between tensors and slots, by one warp.
//
// Most of a part lies in one field whose rows are of whole chunks: then an address is a base and a
// constant, and eight loads are in flight at once. What does not is moved by another loop, which
// looks every chunk up.
#pragma once

#include <cstdint>

#include "transport/device/memory_access.cuh"
#include "transport/device/unaligned.cuh"
#include "transport/device/warp.cuh"
#include "two_sided/cuda_params.h"

namespace moe_ep::two_sided {

// Of a warp, each 512 bytes: what a slot of 4 KiB holds is loaded at once.
inline constexpr int kVectorsInFlight = 8;
// Of what has to be looked up: for few registers, and little code.
inline constexpr int kOddVectorsInFlight = 2;

// Chunks [begin, end) of a part, up to kVectors for each lane, in registers.
template <int kVectors>
class Batch {
 public:
  static constexpr int32_t kChunks = kVectors * kWarpSize;

  __device__ Batch(int32_t begin, int32_t end) : first_(begin + lane_id()), end_(end) {}

  // One behind the other, from the start of the part on.
  __device__ void load_from(const uint8_t* part) {
    const uint8_t* const from = part + int64_t{16} * first_;
    for_each([&](int i, int32_t) { chunks_[i] = load_chunk(from + i * 16 * kWarpSize); });
  }
  __device__ void store_to(uint8_t* part) const {
    uint8_t* const to = part + int64_t{16} * first_;
    for_each([&](int i, int32_t) { store_chunk(to + i * 16 * kWarpSize, chunks_[i]); });
  }
  // from(chunk), to(chunk, value)
  template <typename From>
  __device__ void load(const From& from) {
    for_each([&](int i, int32_t chunk) { chunks_[i] = from(chunk); });
  }
  template <typename To>
  __device__ void store(const To& to) const {
    for_each([&](int i, int32_t chunk) { to(chunk, chunks_[i]); });
  }

 private:
  template <typename Visit>
  __device__ void for_each(const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int32_t chunk = first_ + i * kWarpSize;
      if (chunk < end_) visit(i, chunk);
    }
  }

  int32_t first_;
  int32_t end_;
  uint4 chunks_[kVectors];
};

// Where a chunk of a row lies.
struct ChunkPlace {
  uint8_t* address;
  int32_t bytes;  // up to 16
  bool is_whole;

  __device__ uint4 load() const {
    return is_whole ? load_chunk(address) : load_unaligned(address, bytes);
  }
  __device__ void store(uint4 chunk) const {
    if (is_whole) {
      store_chunk(address, chunk);
    } else {
      store_unaligned(address, chunk, bytes);
    }
  }
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

// The first chunks of a part that lie one behind the other on 16 bytes; there may be none.
struct Run {
  uint8_t* start;
  int32_t chunks;
};
template <typename Record>
__device__ Run run_of(const Record& record, int64_t row, const Item& item) {
  const FieldRows& field = field_of(record, item.begin);
  const ChunkPlace place = place_in(field, row, item.begin);
  if (!field.is_whole) return {place.address, 0};
  const int64_t left = field.row_bytes / 16 - (item.begin - field.begin);
  return {place.address, static_cast<int32_t>(min(left, int64_t{item.chunks}))};
}

// Chunk `index` of the parts of records that follow each other in a slot, the first of which is of
// row `row`.
template <typename Record>
__device__ ChunkPlace place_of(const Record& record, const Item& item, int64_t row, int32_t index) {
  const int32_t before = index / item.chunks;
  const int32_t chunk = item.begin + index - before * item.chunks;
  return place_in(field_of(record, chunk), row + before, chunk);
}

// From `count` rows of tensors to a slot.
template <typename Record>
__device__ void rows_to_slot(const Record& record, const Item& item, int64_t row, int32_t count,
                             uint8_t* slot) {
  using Usual = Batch<kVectorsInFlight>;
  using Odd = Batch<kOddVectorsInFlight>;
  const Run run = run_of(record, row, item);
  const int32_t chunks = count * item.chunks;
  int32_t begin = 0;
  if (count == 1) {
#pragma unroll 1
    for (; begin < run.chunks; begin += Usual::kChunks) {
      Usual batch(begin, run.chunks);
      batch.load_from(run.start);
      batch.store_to(slot);
    }
    begin = run.chunks;
  }
#pragma unroll 1
  for (; begin < chunks; begin += Odd::kChunks) {
    Odd batch(begin, chunks);
    batch.load([&](int32_t index) { return place_of(record, item, row, index).load(); });
    batch.store_to(slot);
  }
}

// From a slot to `count` rows of tensors. emptied() is called when all is loaded.
template <typename Record, typename Emptied>
__device__ void slot_to_rows(const uint8_t* slot, const Record& record, const Item& item,
                             int64_t row, int32_t count, const Emptied& emptied) {
  using Usual = Batch<kVectorsInFlight>;
  using Odd = Batch<kOddVectorsInFlight>;
  const Run run = run_of(record, row, item);
  const int32_t chunks = count * item.chunks;
  int32_t begin = 0;
  if (count == 1) {
#pragma unroll 1
    for (; begin < run.chunks; begin += Usual::kChunks) {
      Usual batch(begin, run.chunks);
      batch.load_from(slot);
      if (run.chunks == chunks && begin + Usual::kChunks >= chunks) emptied();
      batch.store_to(run.start);
    }
    begin = run.chunks;
  }
#pragma unroll 1
  for (; begin < chunks; begin += Odd::kChunks) {
    Odd batch(begin, chunks);
    batch.load_from(slot);
    if (begin + Odd::kChunks >= chunks) emptied();
    batch.store(
        [&](int32_t index, uint4 chunk) { place_of(record, item, row, index).store(chunk); });
  }
}

// A part of one token's record from the tensors to `count` slots, and to a row of this rank's own
// tensors, if `own_row` is not negative.
__device__ inline void row_to_places(const RecordRows& given, int64_t token,
                                     const RecordRows& received, int64_t own_row, const Item& item,
                                     uint8_t* const* places, int32_t count) {
  using Usual = Batch<kVectorsInFlight>;
  using Odd = Batch<kOddVectorsInFlight>;
  const Run run = run_of(given, token, item);
  Run own{nullptr, item.chunks};
  if (own_row >= 0) own = run_of(received, own_row, item);
  const int32_t together = min(run.chunks, own.chunks);
#pragma unroll 1
  for (int32_t begin = 0; begin < together; begin += Usual::kChunks) {
    Usual batch(begin, together);
    batch.load_from(run.start);
#pragma unroll 1
    for (int32_t j = 0; j < count; ++j) batch.store_to(places[j]);
    if (own_row >= 0) batch.store_to(own.start);
  }
#pragma unroll 1
  for (int32_t begin = together; begin < item.chunks; begin += Odd::kChunks) {
    Odd batch(begin, item.chunks);
    batch.load([&](int32_t index) { return place_of(given, item, token, index).load(); });
#pragma unroll 1
    for (int32_t j = 0; j < count; ++j) batch.store_to(places[j]);
    if (own_row < 0) continue;
    batch.store(
        [&](int32_t index, uint4 chunk) { place_of(received, item, own_row, index).store(chunk); });
  }
}

}  // namespace moe_ep::two_sided
