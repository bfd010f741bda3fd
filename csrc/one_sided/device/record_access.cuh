// Reading a thread's chunks of a token's record from the inputs, and writing them where they
// belong.
//
// kWhole: all parts of the record are whole on both sides. Then a chunk is one access, whose
// address is all that depends on the part.
#pragma once

#include <cstdint>

#include "one_sided/device/packets.cuh"
#include "one_sided/device/record.cuh"
#include "one_sided/device/routing.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::one_sided {

// Words [4 * chunk, 4 * chunk + 4) of a row of num_words; zeros behind its end.
__device__ inline uint4 load_words(const void* row, int64_t num_words, int32_t chunk) {
  const auto* const words = static_cast<const uint32_t*>(row) + kWordsPerChunk * chunk;
  const int64_t left = num_words - kWordsPerChunk * chunk;
  return make_uint4(left > 0 ? words[0] : 0, left > 1 ? words[1] : 0, left > 2 ? words[2] : 0,
                    left > 3 ? words[3] : 0);
}

__device__ inline void store_words(void* row, int64_t num_words, int32_t chunk, uint4 v) {
  auto* const words = static_cast<uint32_t*>(row) + kWordsPerChunk * chunk;
  const int64_t left = num_words - kWordsPerChunk * chunk;
  if (left > 0) words[0] = v.x;
  if (left > 1) words[1] = v.y;
  if (left > 2) words[2] = v.z;
  if (left > 3) words[3] = v.w;
}

// Where the chunks of thread q are, and of which part they are.
struct ChunkPlaces {
  uint64_t addresses[kChunksPerThread];
  int32_t parts[kChunksPerThread];  // not looked at if all is whole
};

template <bool kInput>
__device__ ChunkPlaces places_of(const RecordParts& record, const RecordShape& shape, int64_t row,
                                 int32_t q) {
  ChunkPlaces places{};
#pragma unroll
  for (int32_t i = 0; i < RecordParts::kMaxParts; ++i) {
    if (i >= record.num_parts) break;
    const RecordPart& part = record.parts[i];
    const PartRows& rows = kInput ? part.inputs : part.outputs;
    const uint64_t start = rows.origin + static_cast<uint64_t>(row * rows.stride);
#pragma unroll
    for (int k = 0; k < kChunksPerThread; ++k) {
      if (i == 0 || shape.chunk(q, k) >= part.begin) {
        places.addresses[k] = start;
        places.parts[k] = i;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
    places.addresses[k] += uint64_t{16} * static_cast<uint32_t>(shape.chunk(q, k));
  }
  return places;
}

// The payloads and weights of a token; zeros where its ids are to be, and behind the end. `places`
// are those of its inputs.
template <bool kWhole>
__device__ ThreadWords load_record(const RecordParts& record, const RecordShape& shape,
                                   const ChunkPlaces& places, int32_t q) {
  ThreadWords words{};
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
    const int32_t chunk = shape.chunk(q, k);
    if (q >= shape.threads || chunk >= record.end) continue;
    if (chunk >= record.ids_begin && chunk < record.ids_end) continue;
    const RecordPart& part = record.parts[kWhole ? 0 : places.parts[k]];
    if (kWhole || part.inputs.are_whole) {
      words.set_chunk(k, load_chunk(reinterpret_cast<const void*>(places.addresses[k])));
    } else {
      const int64_t left = part.row_bytes - int64_t{16} * (chunk - part.begin);
      words.set_chunk(k, load_unaligned(reinterpret_cast<const void*>(places.addresses[k]),
                                        static_cast<int32_t>(min(left, int64_t{16}))));
    }
  }
  return words;
}

// Puts a record where it has been received; `places` are those of the outputs.
template <bool kWhole>
__device__ void store_record(const RecordParts& record, const RecordShape& shape,
                             const ChunkPlaces& places, int32_t q, const ThreadWords& words) {
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
    const int32_t chunk = shape.chunk(q, k);
    if (q >= shape.threads || chunk >= record.end) continue;
    const RecordPart& part = record.parts[kWhole ? 0 : places.parts[k]];
    if (kWhole || part.outputs.are_whole) {
      store_chunk(reinterpret_cast<void*>(places.addresses[k]), words.chunk(k));
    } else {  // ids or weights
      const int32_t in_part = chunk - part.begin;
      const uint64_t start = places.addresses[k] - uint64_t{16} * static_cast<uint32_t>(in_part);
      store_words(reinterpret_cast<void*>(start),
                  part.row_bytes / static_cast<int64_t>(sizeof(uint32_t)), in_part, words.chunk(k));
    }
  }
}

// Fills in the thread's ids as the receivers see them. True: one of them is an error.
__device__ inline bool load_ids(const DispatchKernelParams& p, const RecordParts& record,
                                const RecordShape& shape, int32_t token, int32_t q,
                                ThreadWords& words) {
  bool invalid = false;
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
    const int32_t chunk = shape.chunk(q, k);
    if (q >= shape.threads || chunk < record.ids_begin || chunk >= record.ids_end) continue;
#pragma unroll
    for (int i = 0; i < kWordsPerChunk; ++i) {
      const int32_t slot = kWordsPerChunk * (chunk - record.ids_begin) + i;
      if (slot >= p.workspace.top_k) break;
      const int64_t expert = expert_id(p, token, slot);
      invalid |= is_invalid(p, expert);
      words.words[kWordsPerChunk * k + i] = static_cast<uint32_t>(id_to_send(p, expert));
    }
  }
  return invalid;
}

}  // namespace moe_ep::one_sided
