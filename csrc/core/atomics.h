// Acquire and release between ranks on CPUs, which are processes or threads. Kernels have theirs in
// device_signal.cuh.
#pragma once

#include <atomic>
#include <cstdint>

namespace moe_ep {

using Atomic32 = std::atomic_ref<uint32_t>;
inline constexpr auto kAcquire = std::memory_order_acquire;
inline constexpr auto kRelease = std::memory_order_release;
inline constexpr auto kSequential = std::memory_order_seq_cst;

inline uint32_t load_acquire(const uint32_t* word) {
  return Atomic32(*const_cast<uint32_t*>(word)).load(kAcquire);
}

// The word has one writer.
inline void store_release(uint32_t* word, uint32_t value) {
  Atomic32(*word).store(value, kRelease);
}

}  // namespace moe_ep
