// Mapping: physical memory at one place of an AddressRange.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory/address_range.h"
#include "memory/physical_allocation.h"

namespace moe_ep::memory {

// Keeps the physical memory alive. Afterwards its addresses are reserved and empty again.
class Mapping {
 public:
  // Throws std::invalid_argument if the allocation does not fit at this offset.
  Mapping(const AddressRange& range, uint64_t offset, const PhysicalAllocation& memory);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping();

  // What the destructor does, but says when it fails.
  void unmap();

 private:
  MemoryKind* kind_;
  std::byte* at_;  // null once unmapped or moved from
  uint64_t bytes_;
};

}  // namespace moe_ep::memory
