// ShareableHandle: what one process hands to another so that it can map the same physical memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <variant>

#include "memory/file_descriptor.h"

namespace moe_ep::memory {

// The two forms of a handle. A group chooses one for each allocation.
enum class HandleForm {
  kFileDescriptor,  // within one host, through an FdChannel
  kFabric,  // GPUs only: plain bytes, which may also go to another host of the NVLink domain
};

const char* name_of(HandleForm form);

// Closes itself. A descriptor keeps the physical memory alive, also while it travels through a
// socket; a FABRIC handle does not: its owner keeps the memory until the peers have imported it.
class ShareableHandle {
 public:
  using FabricBytes = std::array<std::byte, 64>;

  ShareableHandle(FileDescriptor descriptor, uint64_t bytes) noexcept
      : content_(std::move(descriptor)), bytes_(bytes) {}
  ShareableHandle(const FabricBytes& fabric, uint64_t bytes) noexcept
      : content_(fabric), bytes_(bytes) {}

  HandleForm form() const {
    return fabric() != nullptr ? HandleForm::kFabric : HandleForm::kFileDescriptor;
  }
  // -1 once the handle is used up, and in the other form.
  int descriptor() const {
    const auto* descriptor = std::get_if<FileDescriptor>(&content_);
    return descriptor != nullptr ? descriptor->get() : -1;
  }
  // Null in the other form.
  const FabricBytes* fabric() const { return std::get_if<FabricBytes>(&content_); }
  // Of the memory it stands for, as its owner says: whoever imports it checks.
  uint64_t bytes() const { return bytes_; }
  // Empty in the other form.
  FileDescriptor take_descriptor() && {
    auto* descriptor = std::get_if<FileDescriptor>(&content_);
    return descriptor != nullptr ? std::move(*descriptor) : FileDescriptor();
  }

 private:
  std::variant<FileDescriptor, FabricBytes> content_;
  uint64_t bytes_;
};

}  // namespace moe_ep::memory
