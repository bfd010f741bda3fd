// The wait for the kernel before this one, behind what need not wait.
#pragma once

#include <cstdint>

#include "transport/device/architecture.cuh"

namespace moe_ep {

__device__ inline uint64_t address_bits(const volatile void* address) {
  return reinterpret_cast<uint64_t>(address);
}
__device__ inline uint64_t address_bits(uint64_t address) { return address; }

// wait_for_previous_kernel, once `addresses` are known. They depend on parameters only, so that
// their instructions cost nothing before the wait; but the assembler moves the wait up before all
// that it does not need. So it is made to need them: one of them is never null.
template <typename... Addresses>
__device__ void wait_for_previous_kernel_knowing(Addresses... addresses) {
  if constexpr (kHasProgrammaticLaunch) {
    const uint64_t bits = (address_bits(addresses) | ...);
    asm volatile("{.reg .pred q; setp.ne.u64 q,%0,0; @q griddepcontrol.wait;}" ::"l"(bits)
                 : "memory");
  }
}

}  // namespace moe_ep
