#include "memory/mapping.h"

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

namespace moe_ep::memory {
namespace {

std::byte* place(const AddressRange& range, uint64_t offset, uint64_t bytes) {
  const uint64_t granularity = range.kind().granularity();
  if (offset % granularity != 0 || offset > range.bytes() || bytes > range.bytes() - offset) {
    throw std::invalid_argument("offset must be a multiple of " + std::to_string(granularity) +
                                " with room for " + std::to_string(bytes) +
                                " bytes in a range of " + std::to_string(range.bytes()) + ", got " +
                                std::to_string(offset));
  }
  return range.base() + offset;
}

}  // namespace

Mapping::Mapping(const AddressRange& range, uint64_t offset, const PhysicalAllocation& memory)
    : kind_(&range.kind()), at_(place(range, offset, memory.bytes())), bytes_(memory.bytes()) {
  kind_->map(at_, bytes_, memory.id());
}

Mapping::Mapping(Mapping&& other) noexcept
    : kind_(other.kind_), at_(std::exchange(other.at_, nullptr)), bytes_(other.bytes_) {}

Mapping::~Mapping() {
  try {
    unmap();
  } catch (const std::exception&) {
    // The addresses stay mapped until the range is freed, which unmaps all of it.
  }
}

void Mapping::unmap() {
  if (at_ == nullptr) return;
  kind_->unmap(at_, bytes_);
  at_ = nullptr;
}

}  // namespace moe_ep::memory
