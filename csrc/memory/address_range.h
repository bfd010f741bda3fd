// AddressRange: addresses reserved once and freed last; memory comes and goes behind them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory/memory_kind.h"

namespace moe_ep::memory {

// Must outlive every Mapping in it. Freeing it unmaps whatever is still mapped.
class AddressRange {
 public:
  AddressRange(MemoryKind& kind, uint64_t bytes);
  AddressRange(AddressRange&& other) noexcept;
  AddressRange& operator=(AddressRange&&) = delete;
  ~AddressRange();

  MemoryKind& kind() const { return *kind_; }
  std::byte* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }

 private:
  MemoryKind* kind_;
  std::byte* base_;
  uint64_t bytes_;
};

}  // namespace moe_ep::memory
