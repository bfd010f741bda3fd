#include "memory/physical_allocation.h"

#include <utility>

namespace moe_ep::memory {

PhysicalAllocation PhysicalAllocation::create(MemoryKind& kind, uint64_t bytes) {
  return {kind, kind.create(bytes), bytes};
}

PhysicalAllocation PhysicalAllocation::import(MemoryKind& kind, ShareableHandle handle) {
  const uint64_t bytes = handle.bytes();
  return {kind, kind.import_handle(std::move(handle)), bytes};
}

PhysicalAllocation::PhysicalAllocation(PhysicalAllocation&& other) noexcept
    : kind_(std::exchange(other.kind_, nullptr)), id_(other.id_), bytes_(other.bytes_) {}

PhysicalAllocation::~PhysicalAllocation() {
  if (kind_ != nullptr) kind_->destroy(id_);
}

}  // namespace moe_ep::memory
