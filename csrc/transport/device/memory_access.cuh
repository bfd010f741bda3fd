// The machine's ways to move bytes that C++ has no name for: packets, bulk copies between global
// and shared memory, and the hand-over between two launches.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "transport/device/architecture.cuh"

namespace moe_ep {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- packets: 16 bytes in one access, at system scope

// `.b128` is one access by the memory model; a vector of four words is four.
__device__ inline void store_packet(void* to, uint4 v) {
  asm volatile(
      "{.reg .b64 a,b; .reg .b128 q; mov.b64 a,{%1,%2}; mov.b64 b,{%3,%4}; mov.b128 q,{a,b};"
      " st.relaxed.sys.global.b128 [%0],q;}" ::"l"(to),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}

// Use all four words of the result: the assembler narrows the load to the words that are used, and
// then they need not belong together.
__device__ inline uint4 load_packet(const void* from) {
  uint4 v;
  asm volatile(
      "{.reg .b64 a,b; .reg .b128 q; ld.relaxed.sys.global.b128 q,[%4]; mov.b128 {a,b},q;"
      " mov.b64 {%0,%1},a; mov.b64 {%2,%3},b;}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(from)
      : "memory");
  return v;
}

// ---- 16 bytes of payload that will not be looked at again by this SM

__device__ inline uint4 load_chunk(const void* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ inline void store_chunk(void* to, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// The same into shared memory, beside what the warp does meanwhile; both addresses are multiples of
// 16 bytes. Read it there behind `wait_for_loads`, by the thread that began it.
__device__ inline void load_to_shared(void* shared, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(shared_address(shared)), "l"(from)
               : "memory");
}
__device__ inline void wait_for_loads() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// What this thread began since the last call becomes one group, also if that is nothing.
__device__ inline void end_group_of_loads() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// For all groups but the last kPending.
template <int kPending>
__device__ inline void wait_for_groups_of_loads() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Up to 3 bytes from an aligned address, the lowest ones of the result.
__device__ inline uint32_t load_few_bytes(const void* from, uint32_t bytes) {
  const auto* const byte = static_cast<const uint8_t*>(from);
  uint32_t result = (bytes & 2) != 0 ? *static_cast<const uint16_t*>(from) : 0u;
  if ((bytes & 1) != 0) result |= static_cast<uint32_t>(byte[bytes - 1]) << (bytes - 1) * 8;
  return result;
}

// 1 to 16 bytes from any address; zeros behind them. Reads aligned words, and of the one that the
// end lies in only the bytes in front of it: a tensor may end there. Bytes in front of the first
// one may be read: memory is not given out in less than words.
__device__ inline uint4 load_unaligned(const void* from, int32_t bytes) {
  const auto begin = reinterpret_cast<uint64_t>(from);
  const uint64_t end = begin + static_cast<uint64_t>(bytes);
  const auto* const words = reinterpret_cast<const uint32_t*>(begin & ~uint64_t{3});
  const auto* const last = reinterpret_cast<const uint32_t*>(end & ~uint64_t{3});
  const uint32_t tail = load_few_bytes(last, static_cast<uint32_t>(end & 3));
  uint32_t w[5];
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    w[i] = words + i < last ? words[i] : words + i == last ? tail : 0;
  }
  const uint32_t shift = static_cast<uint32_t>(begin & 3) * 8;
  return make_uint4(__funnelshift_r(w[0], w[1], shift), __funnelshift_r(w[1], w[2], shift),
                    __funnelshift_r(w[2], w[3], shift), __funnelshift_r(w[3], w[4], shift));
}

// ---- where instructions go

// The value, in a register from here on. What is made of it is not computed before this place, not
// even where that would spare a loop the work; and it is not computed anew from parameters.
__device__ inline uint32_t held(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
template <typename T>
__device__ T* held(T* global) {
  size_t address = __cvta_generic_to_global(global);  // so that loads and stores know the space
  asm("" : "+l"(address));
  return static_cast<T*>(__cvta_global_to_generic(address));
}

// ---- counters of work

inline constexpr uint32_t kNoItem = 0xFFFFFFFFu;

// For lane 0 alone. An atomic on one address is made one access of the warp, and a shuffle that
// waits for its result at once; this one, at an address that looks like the lane's own, lets the
// caller go on until it looks at the result.
class ItemCounter {
 public:
  // The address stays in registers: it takes 15 instructions.
  __device__ explicit ItemCounter(uint32_t* counter) {
    asm volatile("{.reg .b32 lane; mov.u32 lane,%%laneid; mad.wide.u32 %0,lane,4,%1;}"
                 : "=l"(at_)
                 : "l"(counter));
  }
  // Takes `count` items and returns the first.
  __device__ uint32_t take(uint32_t count) const {
    uint32_t first;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0,[%1],%2;"
                 : "=r"(first)
                 : "l"(at_), "r"(count)
                 : "memory");
    return first;
  }
  __device__ uint64_t address() const { return at_; }

 private:
  uint64_t at_;
};

// ---- bulk copies; addresses and sizes are multiples of 16 bytes

// Counts the bytes that arrive in shared memory; one thread announces them.
class BulkBarrier {
 public:
  __device__ void init() {
    asm volatile("mbarrier.init.shared.b64 [%0],1;" ::"r"(shared_address(&word_)) : "memory");
  }
  // Makes `init` visible to the copy engine; before the first copy.
  __device__ static void publish_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __device__ void expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(shared_address(&word_)),
                 "r"(bytes)
                 : "memory");
  }
  // Where no bytes are announced: what this thread did before is seen by those that wait.
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared.b64 _,[%0];" ::"r"(shared_address(&word_)) : "memory");
  }
  // Returns when the phase of this parity (0 first, then 1, 0, ...) is complete.
  __device__ void wait(uint32_t parity) {
    while (!is_complete(parity)) {
    }
  }

 private:
  // May take its time to say no, where the hardware lets a warp sleep at a barrier.
  __device__ bool is_complete(uint32_t parity) {
    uint32_t complete;
    if constexpr (kHasBulkCopies) {
      asm volatile(
          "{.reg .pred q; mbarrier.try_wait.parity.shared.b64 q,[%1],%2; selp.u32 %0,1,0,q;}"
          : "=r"(complete)
          : "r"(shared_address(&word_)), "r"(parity)
          : "memory");
    } else {
      asm volatile(
          "{.reg .pred q; mbarrier.test_wait.parity.shared.b64 q,[%1],%2; selp.u32 %0,1,0,q;}"
          : "=r"(complete)
          : "r"(shared_address(&word_)), "r"(parity)
          : "memory");
    }
    return complete != 0;
  }

  friend __device__ void bulk_load(void*, const void*, uint32_t, BulkBarrier&);
  uint64_t word_;
};

__device__ inline void bulk_load(void* shared, const void* global, uint32_t bytes,
                                 BulkBarrier& arrived) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(&arrived.word_))
      : "memory");
}

__device__ inline void bulk_store(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// The stores that this thread issued since the last call become one group.
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// All but the last kPending groups have left shared memory: it may be written again.
template <int kPending>
__device__ inline void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// All but the last kPending groups have been written to global memory.
template <int kPending>
__device__ inline void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// What this thread wrote to shared memory, or has read from it, is ordered before later bulk
// copies.
__device__ inline void fence_shared_to_bulk() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- barriers of some warps of a CTA. Number 0 is that of the whole CTA

// What this thread wrote before is visible to those that wait; it does not wait itself.
template <int kNumber, int kThreads>
__device__ void arrive_at_barrier() {
  asm volatile("bar.arrive %0,%1;" ::"n"(kNumber), "n"(kThreads) : "memory");
}
template <int kNumber, int kThreads>
__device__ void wait_at_barrier() {
  asm volatile("bar.sync %0,%1;" ::"n"(kNumber), "n"(kThreads) : "memory");
}

// ---- programmatic launch: nothing without the launch attribute

// Returns when the kernel before this one on the stream is complete and its writes are visible.
__device__ inline void wait_for_previous_kernel() {
  if constexpr (kHasProgrammaticLaunch) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel of the stream may start, as far as this CTA goes: the first call in it counts.
// Only after the last wait on a peer, since its CTAs take places that a peer on the same GPU may
// need to make progress (four ranks on one GPU hung). Where every warp waits for packets, the first
// one to be done makes the call while others of its CTA still wait: to leave it to the last cost
// 0.8 us a launch. See docs/cake.md for why that may be.
__device__ inline void allow_next_kernel() {
  if constexpr (kHasProgrammaticLaunch) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
}

}  // namespace moe_ep
