// The only acquire and release in the library, at system scope: peers are other processes, and on
// CUDA other GPUs.
#pragma once

#include <cstdint>

#include "core/host_device.h"

#if defined(__CUDACC__)
#include <cuda/atomic>
#else
#include <atomic>
#endif

namespace moe_ep {

#if defined(__CUDACC__)
using SystemAtomic32 = cuda::atomic_ref<uint32_t, cuda::thread_scope_system>;
inline constexpr auto kRelaxed = cuda::memory_order_relaxed;
inline constexpr auto kAcquire = cuda::memory_order_acquire;
inline constexpr auto kRelease = cuda::memory_order_release;
inline constexpr auto kSequential = cuda::memory_order_seq_cst;
#else
using SystemAtomic32 = std::atomic_ref<uint32_t>;
inline constexpr auto kRelaxed = std::memory_order_relaxed;
inline constexpr auto kAcquire = std::memory_order_acquire;
inline constexpr auto kRelease = std::memory_order_release;
inline constexpr auto kSequential = std::memory_order_seq_cst;
#endif

MOE_EP_HOST_DEVICE inline uint32_t load_acquire(const uint32_t* word) {
  return SystemAtomic32(*const_cast<uint32_t*>(word)).load(kAcquire);
}

// The word has one writer.
MOE_EP_HOST_DEVICE inline void store_release(uint32_t* word, uint32_t value) {
  SystemAtomic32(*word).store(value, kRelease);
}

}  // namespace moe_ep
