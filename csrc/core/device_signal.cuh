// signal and wait for kernels: the only acquire and release on the device besides packets, whose
// data and flag are one access. Scope is the system: peers are other processes and other GPUs.
#pragma once

#include <cstdint>

namespace moe_ep {

// Publishes what this thread wrote, and what it knows that others wrote (those behind a CTA barrier
// with it), then adds to a counter.
__device__ inline void signal_add(uint32_t* word, uint32_t value) {
  asm volatile("red.release.sys.global.add.u32 [%0],%1;" ::"l"(word), "r"(value) : "memory");
}

// The same, and stores a word or a pair of words, low first.
__device__ inline void signal_store(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0],%1;" ::"l"(word), "r"(value) : "memory");
}
__device__ inline void signal_store(void* pair, uint32_t low, uint32_t high) {
  asm volatile("st.release.sys.global.u64 [%0],%1;" ::"l"(pair),
               "l"(static_cast<uint64_t>(high) << 32 | low)
               : "memory");
}

// A release in two halves, for a value that is not there yet: the fence takes as long as a load,
// and here both are under way at once. Whoever sees the store sees what this thread knew at the
// fence.
__device__ inline void release_fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ inline void store_after_fence(void* pair, uint32_t low, uint32_t high) {
  asm volatile("st.relaxed.sys.global.u64 [%0],%1;" ::"l"(pair),
               "l"(static_cast<uint64_t>(high) << 32 | low)
               : "memory");
}

// One look at a flag; once it has the awaited value, what its signaller published is visible.
__device__ inline uint32_t poll(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0,[%1];" : "=r"(value) : "l"(word) : "memory");
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
