// PhysicalAllocation: physical memory that this process made or imported, without an address.
#pragma once

#include <cstdint>

#include "memory/memory_kind.h"

namespace moe_ep::memory {

// One reference to the memory. Mappings and exported descriptors hold their own: dropping this one
// early is fine.
class PhysicalAllocation {
 public:
  // New memory, zero-filled, to be shared by this form of handle.
  static PhysicalAllocation create(MemoryKind& kind, uint64_t bytes, HandleForm form);
  // A peer's memory, by the handle's own form.
  static PhysicalAllocation import(MemoryKind& kind, ShareableHandle handle);

  PhysicalAllocation(PhysicalAllocation&& other) noexcept;
  PhysicalAllocation& operator=(PhysicalAllocation&&) = delete;
  ~PhysicalAllocation();

  ShareableHandle share() const { return kind_->export_handle(id_, bytes_, form_); }
  PhysicalId id() const { return id_; }
  uint64_t bytes() const { return bytes_; }
  HandleForm form() const { return form_; }

 private:
  PhysicalAllocation(MemoryKind& kind, PhysicalId id, uint64_t bytes, HandleForm form) noexcept
      : kind_(&kind), id_(id), bytes_(bytes), form_(form) {}

  MemoryKind* kind_;  // null once moved from
  PhysicalId id_;
  uint64_t bytes_;
  HandleForm form_;
};

}  // namespace moe_ep::memory
