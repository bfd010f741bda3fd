// A token's record in a usual step (see PacketInputs::kUsual), as record.cuh and record_access.cuh
// have it for any step, in fewer words and instructions: one payload or two, ids and weights, all
// of whole chunks, and of a thread's chunks only the last can be of another part than the first
// payload.
#pragma once

#include <cstdint>

#include "one_sided/cuda_params.h"
#include "one_sided/device/packets.cuh"
#include "one_sided/device/record.cuh"
#include "one_sided/device/record_access.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::one_sided {

struct UsualParts {
  static constexpr int kLast = kChunksPerThread - 1;

  // As PartRows, of both sides.
  struct Part {
    uint64_t input;
    uint64_t output;
    uint32_t input_stride;
    uint32_t output_stride;
  };

  Part payload;
  Part scales;  // a second payload; not looked at if there is none
  Part ids;
  Part weights;
  int32_t scales_begin;  // chunks; ids_begin if there are none
  int32_t ids_begin;
  int32_t weights_begin;
  int32_t end;

  static bool can_stand_for(const RecordParts& record, const RecordShape& shape) {
    if (!record.are_whole || (record.num_parts != 3 && record.num_parts != 4)) return false;
    if (record.ids_end == record.end) return false;  // no weights
    for (int32_t i = 0; i < record.num_parts; ++i) {
      const RecordPart& part = record.parts[i];
      if (part.inputs.stride > INT32_MAX || part.outputs.stride > INT32_MAX) return false;
    }
    return shape.chunk(0, kLast) <= record.parts[1].begin;
  }
  // If they can.
  static UsualParts of(const RecordParts& record) {
    const auto part = [&](int32_t i) {
      const RecordPart& part = record.parts[i];
      return Part{part.inputs.origin, part.outputs.origin,
                  static_cast<uint32_t>(part.inputs.stride),
                  static_cast<uint32_t>(part.outputs.stride)};
    };
    const int32_t ids = record.num_parts - 2;
    return {part(0),
            part(1),
            part(ids),
            part(ids + 1),
            record.parts[1].begin,
            record.parts[ids].begin,
            record.parts[ids + 1].begin,
            record.end};
  }
};

template <bool kInput>
__device__ ChunkPlaces places_of(const UsualParts& parts, const RecordShape& shape, int64_t row,
                                 int32_t q) {
  const auto start = [&](const UsualParts::Part& part) {
    const uint32_t stride = kInput ? part.input_stride : part.output_stride;
    return (kInput ? part.input : part.output) + uint64_t{static_cast<uint32_t>(row)} * stride;
  };
  const auto offset = [&](int k) {
    return uint64_t{16} * static_cast<uint32_t>(shape.chunk(q, k));
  };
  ChunkPlaces places{};
  const uint64_t payload = start(parts.payload);
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) places.addresses[k] = payload + offset(k);
  const int32_t last = shape.chunk(q, UsualParts::kLast);
  if (last >= parts.scales_begin) {
    uint64_t other = start(parts.scales);
    if (last >= parts.ids_begin) other = start(parts.ids);
    if (last >= parts.weights_begin) other = start(parts.weights);
    places.addresses[UsualParts::kLast] = other + offset(UsualParts::kLast);
  }
  return places;
}

// Whether chunk k of thread q is one of the record. Those behind it are last ones.
__device__ inline bool has_chunk(const UsualParts& parts, const RecordShape& shape, int32_t q,
                                 int k) {
  return q < shape.threads && (k < UsualParts::kLast || shape.chunk(q, k) < parts.end);
}

// The ids, too, as they are: see settle_ids.
__device__ inline ThreadWords load_record(const UsualParts& parts, const RecordShape& shape,
                                          const ChunkPlaces& places, int32_t q) {
  ThreadWords words{};
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
    if (!has_chunk(parts, shape, q, k)) continue;
    words.set_chunk(k, load_chunk(reinterpret_cast<const void*>(places.addresses[k])));
  }
  return words;
}

__device__ inline void store_record(const UsualParts& parts, const RecordShape& shape,
                                    const ChunkPlaces& places, int32_t q,
                                    const ThreadWords& words) {
#pragma unroll
  for (int k = 0; k < kChunksPerThread; ++k) {
    if (!has_chunk(parts, shape, q, k)) continue;
    store_chunk(reinterpret_cast<void*>(places.addresses[k]), words.chunk(k));
  }
}

// Makes of the thread's ids what the receivers are to see. True: one of them may be an error. It
// need not: padding, too, is no expert.
__device__ inline bool settle_ids(const UsualParts& parts, const RecordShape& shape,
                                  uint32_t num_experts, int32_t invalid_expert_id, int32_t q,
                                  ThreadWords& words) {
  const int32_t last = shape.chunk(q, UsualParts::kLast);
  if (last < parts.ids_begin || last >= parts.weights_begin) return false;
  bool suspicious = false;
#pragma unroll
  for (int i = 0; i < kWordsPerChunk; ++i) {
    uint32_t& id = words.words[kWordsPerChunk * UsualParts::kLast + i];
    const bool is_expert = id < num_experts;
    suspicious |= !is_expert;
    if (!is_expert) id = static_cast<uint32_t>(invalid_expert_id);
  }
  return suspicious;
}

}  // namespace moe_ep::one_sided
