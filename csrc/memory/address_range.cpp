#include "memory/address_range.h"

#include <utility>

namespace moe_ep::memory {

AddressRange::AddressRange(MemoryKind& kind, uint64_t bytes)
    : kind_(&kind), base_(kind.reserve(bytes)), bytes_(bytes) {}

AddressRange::AddressRange(AddressRange&& other) noexcept
    : kind_(other.kind_), base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}

AddressRange::~AddressRange() {
  if (base_ != nullptr) kind_->free_reserved(base_, bytes_);
}

}  // namespace moe_ep::memory
