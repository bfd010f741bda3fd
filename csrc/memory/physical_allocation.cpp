#include "memory/physical_allocation.h"

#include <utility>

namespace moe_ep::memory {

PhysicalAllocation PhysicalAllocation::create(MemoryKind& kind, uint64_t bytes, HandleForm form) {
  return {kind, kind.create(bytes, form), bytes, form};
}

PhysicalAllocation PhysicalAllocation::import(MemoryKind& kind, ShareableHandle handle) {
  const uint64_t bytes = handle.bytes();
  const HandleForm form = handle.form();
  return {kind, kind.import_handle(std::move(handle)), bytes, form};
}

PhysicalAllocation::PhysicalAllocation(PhysicalAllocation&& other) noexcept
    : kind_(std::exchange(other.kind_, nullptr)),
      id_(other.id_),
      bytes_(other.bytes_),
      form_(other.form_) {}

PhysicalAllocation::~PhysicalAllocation() {
  if (kind_ != nullptr) kind_->destroy(id_);
}

}  // namespace moe_ep::memory
