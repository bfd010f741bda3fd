// A run of 16-byte chunks as packets: how it is dealt to the threads of both sides, and what one
// thread has of it: three chunks, which are four packets. See PacketSlots.
#pragma once

#include <cstdint>

#include "core/epoch.h"
#include "core/host_device.h"
#include "core/workspace_layout.h"
#include "one_sided/device/routing.cuh"
#include "transport/device/memory_access.cuh"

namespace moe_ep::one_sided {

inline constexpr int kChunksPerThread = PacketSlots::kChunksPerThread;
inline constexpr int kPacketsPerThread = PacketSlots::kPacketsPerThread;
inline constexpr int kWordsPerChunk = 4;

// How a run of chunks is dealt to the threads and warps of both sides.
struct RecordShape {
  static constexpr int32_t kMaxThreads = INT32_MAX / PacketSlots::kPacketBytes;

  int32_t threads;  // q of thread q is below this
  int32_t pieces;   // of 32 threads: a warp's share

  static constexpr RecordShape of(int32_t chunks) {
    const auto threads = static_cast<int32_t>(PacketSlots::threads(static_cast<uint64_t>(chunks)));
    return {threads, (threads + kWarpSize - 1) / kWarpSize};
  }
  MOE_EP_HOST_DEVICE constexpr int32_t chunk(int32_t q, int k) const { return k * threads + q; }
  // Of the slot.
  MOE_EP_HOST_DEVICE constexpr uint64_t packet(int32_t q, int j) const {
    return static_cast<uint64_t>(j) * static_cast<uint32_t>(threads) + static_cast<uint32_t>(q);
  }
  // Bytes from a thread's packet to its next. Up to kMaxThreads.
  MOE_EP_HOST_DEVICE constexpr uint32_t step() const {
    return static_cast<uint32_t>(threads) * static_cast<uint32_t>(PacketSlots::kPacketBytes);
  }
  // From the start of the slot.
  MOE_EP_HOST_DEVICE constexpr uint64_t packet_offset(int32_t q, int j) const {
    return packet(q, j) * PacketSlots::kPacketBytes;
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
  MOE_EP_HOST_DEVICE constexpr uint4 packet(int j, uint32_t tag) const {
    return uint4{words[3 * j], words[3 * j + 1], words[3 * j + 2], tag};
  }
  MOE_EP_HOST_DEVICE constexpr void set_packet(int j, uint4 v) {
    words[3 * j] = v.x;
    words[3 * j + 1] = v.y;
    words[3 * j + 2] = v.z;
  }
};

namespace packet_checks {

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

}  // namespace packet_checks

// `at`, here and below: this thread's first packet.
__device__ inline void store_packets(uint8_t* at, const RecordShape& shape,
                                     const ThreadWords& words, uint32_t epoch) {
#pragma unroll
  for (int j = 0; j < kPacketsPerThread; ++j, at += shape.step()) {
    store_packet(at, words.packet(j, packet_tag(epoch)));
  }
}

// The packets of a thread as they lie in a slot, which may not have come yet.
struct ThreadPackets {
  uint4 packets[kPacketsPerThread];

  // All loads in flight at once.
  __device__ void load(const uint8_t* at, const RecordShape& shape) {
#pragma unroll
    for (int j = 0; j < kPacketsPerThread; ++j, at += shape.step()) packets[j] = load_packet(at);
  }
  __device__ bool are_of(uint32_t epoch) const {
    bool all = true;
#pragma unroll
    for (int j = 0; j < kPacketsPerThread; ++j) all &= packets[j].w == packet_tag(epoch);
    return all;
  }
  __device__ ThreadWords words() const {
    ThreadWords words;
#pragma unroll
    for (int j = 0; j < kPacketsPerThread; ++j) words.set_packet(j, packets[j]);
    return words;
  }
};

}  // namespace moe_ep::one_sided
