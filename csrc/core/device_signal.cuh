// signal and wait for kernels: the only acquire and release on the device besides packets, whose
// data and flag are one access. Peers are other processes, on this GPU or on others.
#pragma once

#include <cstdint>

namespace moe_ep {

// Where those are that a release is for. Processes that share a GPU are ordered by its L2 cache,
// like grids of one process; only the way to another GPU needs the system's scope. On an H200 a
// release of that scope takes 0.5 us, with four or more processes on the GPU 1.3 us; one of the
// GPU's takes 0.1 us.
enum class Reach : int32_t { kSystem, kGpu };

// A release in two halves, for a value that is not there yet: the fence takes as long as a load,
// and here both are under way at once. Whoever sees the store sees what this thread wrote before
// the fence, and what it knows that others wrote (those behind a CTA barrier with it).
__device__ inline void release_fence(Reach reach) {
  if (reach == Reach::kGpu) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
  } else {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
  }
}
__device__ inline void store_after_fence(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0],%1;" ::"l"(word), "r"(value) : "memory");
}
// A pair of words, low first.
__device__ inline void store_after_fence(void* pair, uint32_t low, uint32_t high) {
  asm volatile("st.relaxed.sys.global.u64 [%0],%1;" ::"l"(pair),
               "l"(static_cast<uint64_t>(high) << 32 | low)
               : "memory");
}

// A release whose value is known: adds to a counter, or stores a word or a pair of words.
__device__ inline void signal_add(uint32_t* word, uint32_t value, Reach reach) {
  release_fence(reach);
  asm volatile("red.relaxed.sys.global.add.u32 [%0],%1;" ::"l"(word), "r"(value) : "memory");
}
__device__ inline void signal_store(uint32_t* word, uint32_t value, Reach reach) {
  release_fence(reach);
  store_after_fence(word, value);
}
__device__ inline void signal_store(void* pair, uint32_t low, uint32_t high, Reach reach) {
  release_fence(reach);
  store_after_fence(pair, low, high);
}

// One look at a flag; once it has the awaited value, what its signaller published is visible.
__device__ inline uint32_t poll(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0,[%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
// A look that counts as `poll` behind a `release_fence`, which also acquires: it is under way
// together with what else that waits for.
__device__ inline uint32_t peek(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0,[%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
struct Pair {
  uint32_t low;
  uint32_t high;
};
__device__ inline Pair poll_pair(const void* pair) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0,[%1];" : "=l"(value) : "l"(pair) : "memory");
  return {static_cast<uint32_t>(value), static_cast<uint32_t>(value >> 32)};
}

// Within one GPU: adds to a counter and returns what it was; what the adders before wrote is
// visible to the one that comes last.
__device__ inline uint32_t signal_and_count(uint32_t* word, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0,[%1],%2;"
               : "=r"(before)
               : "l"(word), "r"(value)
               : "memory");
  return before;
}

// Nanoseconds of wall clock.
__device__ inline uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(time));
  return time;
}

}  // namespace moe_ep
