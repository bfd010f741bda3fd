// MemoryKind: the operations that a kind of memory must give so that ranks can share segments of
// it.
//
// The owning types (AddressRange, PhysicalAllocation, Mapping) and the protocol (SegmentedMemory)
// are written once over this interface. Sizes and offsets are multiples of granularity(). Every
// operation that can fail throws std::system_error or std::runtime_error and then has changed
// nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "memory/shareable_handle.h"

namespace moe_ep::memory {

// Names one piece of physical memory within its kind, in this process.
enum class PhysicalId : uint64_t {};

class MemoryKind {
 public:
  virtual ~MemoryKind() = default;

  // The CUDA device whose memory it is; none: the memory of CPUs.
  virtual std::optional<int> cuda_ordinal() const { return std::nullopt; }

  // A power of two: what can be mapped at once, and where it can start.
  virtual uint64_t granularity() const = 0;

  // Addresses without memory: writing to them faults.
  virtual std::byte* reserve(uint64_t bytes) = 0;
  virtual void free_reserved(std::byte* base, uint64_t bytes) noexcept = 0;

  // Physical memory without an address, zero-filled and all there: no later write can fail for lack
  // of memory. Can be exported in this form of handle only. destroy() drops one reference; mappings
  // and descriptors hold their own.
  virtual PhysicalId create(uint64_t bytes, HandleForm form) = 0;
  virtual void destroy(PhysicalId id) noexcept = 0;

  virtual ShareableHandle export_handle(PhysicalId id, uint64_t bytes, HandleForm form) = 0;
  // Consumes the handle. Memory that is not as large as it says is refused here or by map().
  virtual PhysicalId import_handle(ShareableHandle handle) = 0;

  // Puts all of `id` at reserved addresses, for reading and writing.
  virtual void map(std::byte* at, uint64_t bytes, PhysicalId id) = 0;
  // Waits until the device no longer works on the memory. The addresses are reserved again:
  // touching them faults.
  virtual void unmap(std::byte* at, uint64_t bytes) = 0;
};

}  // namespace moe_ep::memory
