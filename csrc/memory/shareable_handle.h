// ShareableHandle: what one process hands to another so that it can map the same physical memory.
#pragma once

#include <cstdint>
#include <utility>

#include "memory/file_descriptor.h"

namespace moe_ep::memory {

// Keeps the physical memory alive, also while it travels through a socket. Closes itself.
class ShareableHandle {
 public:
  ShareableHandle(FileDescriptor descriptor, uint64_t bytes) noexcept
      : descriptor_(std::move(descriptor)), bytes_(bytes) {}

  int descriptor() const { return descriptor_.get(); }
  // Of the memory it stands for, as its owner says: whoever imports it checks.
  uint64_t bytes() const { return bytes_; }
  FileDescriptor take_descriptor() && { return std::move(descriptor_); }

 private:
  FileDescriptor descriptor_;
  uint64_t bytes_;
};

}  // namespace moe_ep::memory
