// A token's record as a thread sees it: three chunks of 16 bytes, which are four packets. The order
// of the chunks is payloads, ids, weights; see PacketSlots for the mapping to threads and packets.
#pragma once

#include <cstdint>

#include "cake/cuda_params.h"
#include "cake/device/memory_access.cuh"
#include "cake/device/routing.cuh"
#include "cake/device/workspace.cuh"
#include "core/fast_divide.h"

namespace moe_ep::cake {

inline constexpr int kChunksPerThread = PacketSlots::kChunksPerThread;
inline constexpr int kPacketsPerThread = PacketSlots::kPacketsPerThread;
inline constexpr int kWordsPerChunk = 4;

// How a run of chunks is dealt to the threads and warps of both sides.
struct RecordShape {
  int32_t threads;  // q of thread q is below this
  int32_t pieces;   // of 32 threads: a warp's share

  static constexpr RecordShape of(int32_t chunks) {
    const auto threads = static_cast<int32_t>(PacketSlots::threads(static_cast<uint64_t>(chunks)));
    return {threads, (threads + kWarpSize - 1) / kWarpSize};
  }
  MOE_EP_HOST_DEVICE constexpr int32_t chunk(int32_t q, int k) const { return k * threads + q; }
  // From the start of the slot.
  MOE_EP_HOST_DEVICE constexpr uint64_t packet_offset(int32_t q, int j) const {
    return (static_cast<uint64_t>(j) * static_cast<uint32_t>(threads) + static_cast<uint32_t>(q)) *
           PacketSlots::kPacketBytes;
  }
};

// The words of a thread: those of its chunks in order, and those of its packets without the epochs.
struct ThreadWords {
  uint32_t words[kChunksPerThread * kWordsPerChunk];

  MOE_EP_HOST_DEVICE constexpr uint4 chunk(int k) const {
    return uint4{words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]};
  }
  MOE_EP_HOST_DEVICE constexpr void set_chunk(int k, uint4 v) {
    words[4 * k] = v.x;
    words[4 * k + 1] = v.y;
    words[4 * k + 2] = v.z;
    words[4 * k + 3] = v.w;
  }
  MOE_EP_HOST_DEVICE constexpr uint4 packet(int j, uint32_t epoch) const {
    return uint4{words[3 * j], words[3 * j + 1], words[3 * j + 2], epoch};
  }
  MOE_EP_HOST_DEVICE constexpr void set_packet(int j, uint4 v) {
    words[3 * j] = v.x;
    words[3 * j + 1] = v.y;
    words[3 * j + 2] = v.z;
  }
};

namespace record_checks {

// What one side packs the other unpacks.
constexpr bool packets_carry_all_words() {
  ThreadWords sent{};
  for (int k = 0; k < kChunksPerThread; ++k) {
    const auto first = static_cast<uint32_t>(10 * k);
    sent.set_chunk(k, uint4{first, first + 1, first + 2, first + 3});
  }
  ThreadWords received{};
  for (int j = 0; j < kPacketsPerThread; ++j) received.set_packet(j, sent.packet(j, 7));
  for (int k = 0; k < kChunksPerThread; ++k) {
    const uint4 chunk = received.chunk(k);
    const auto first = static_cast<uint32_t>(10 * k);
    if (chunk.x != first || chunk.y != first + 1 || chunk.z != first + 2 || chunk.w != first + 3) {
      return false;
    }
  }
  return sent.packet(3, 7).w == 7;
}

// Every chunk has one thread, every packet its own place, and the slot holds them all.
constexpr bool threads_cover_a_record_of(int32_t chunks) {
  const RecordShape shape = RecordShape::of(chunks);
  int32_t next_chunk = 0;
  for (int k = 0; k < kChunksPerThread; ++k) {
    for (int32_t q = 0; q < shape.threads; ++q) {
      if (shape.chunk(q, k) != next_chunk++) return false;
    }
  }
  uint64_t next_packet = 0;
  for (int j = 0; j < kPacketsPerThread; ++j) {
    for (int32_t q = 0; q < shape.threads; ++q) {
      if (shape.packet_offset(q, j) != next_packet) return false;
      next_packet += PacketSlots::kPacketBytes;
    }
  }
  return next_chunk >= chunks && next_packet == PacketSlots::bytes(static_cast<uint64_t>(chunks)) &&
         shape.pieces * kWarpSize >= shape.threads &&
         (shape.pieces - 1) * kWarpSize < shape.threads;
}

static_assert(kChunksPerThread * 16 == kPacketsPerThread * 12);
static_assert(packets_carry_all_words());
static_assert(threads_cover_a_record_of(1) && threads_cover_a_record_of(96) &&
              threads_cover_a_record_of(97) && threads_cover_a_record_of(900));

}  // namespace record_checks

// Rows of one part of a record, on one side of the exchange. Chunk c of the record, if it is of
// this part, is at origin + row * stride + 16 * c.
struct PartRows {
  uint64_t origin;
  int64_t stride;
  bool are_whole;  // chunks start on 16 bytes, and are all there
};

// A payload, the ids or the weights.
struct RecordPart {
  PartRows inputs;    // of this rank, by token
  PartRows outputs;   // what it has received, by row
  int64_t row_bytes;  // without the padding of the last chunk
  int32_t begin;      // the first chunk
};

struct RecordParts {
  static constexpr int32_t kMaxParts = kMaxPayloads + 2;

  RecordPart parts[kMaxParts];
  int32_t num_parts;
  int32_t ids_begin;  // chunks
  int32_t ids_end;
  int32_t end;
  bool are_whole;  // all parts on both sides

  static RecordParts of(const DispatchKernelParams& p) {
    const DeviceWorkspace& w = p.workspace;
    const uint8_t* const segment = w.base + w.ep_rank * w.rank_stride;
    RecordParts record{};
    record.are_whole = true;
    for (int32_t i = 0; i < p.num_payloads; ++i) {
      const RowsIn& rows = p.payloads[i];
      // In the workspace the pitch has room for whole chunks.
      record.add({address(rows.data), rows.stride, p.payload_is_aligned[i]},
                 {address(segment + p.placement.offset[i]),
                  static_cast<int64_t>(p.placement.pitch[i]), true},
                 rows.row_bytes);
    }
    const int64_t row_bytes = w.top_k * static_cast<int64_t>(sizeof(int32_t));
    const auto dense = [&](const void* rows) {
      return PartRows{address(rows), row_bytes,
                      (address(rows) | static_cast<uint64_t>(row_bytes)) % kRowAlignment == 0};
    };
    record.ids_begin = record.end;
    PartRows ids = dense(p.topk_ids);  // not read by chunks: see load_ids and IdBlock
    record.add(ids, dense(p.out_topk_ids), row_bytes);
    record.ids_end = record.end;
    if (p.has_weights) record.add(dense(p.topk_weights), dense(p.out_topk_weights), row_bytes);
    return record;
  }

 private:
  static uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }
  void add(PartRows inputs, PartRows outputs, int64_t row_bytes) {
    const uint64_t before = static_cast<uint64_t>(end) * kRowAlignment;
    inputs.origin -= before;
    outputs.origin -= before;
    are_whole &= inputs.are_whole && outputs.are_whole;
    parts[num_parts++] = {inputs, outputs, row_bytes, end};
    end += static_cast<int32_t>(row_pitch(row_bytes) / kRowAlignment);
  }
};

}  // namespace moe_ep::cake
