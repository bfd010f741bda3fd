#include "memory/file_descriptor.h"

#include <fcntl.h>
#include <unistd.h>

#include <utility>

#include "memory/system_error.h"

namespace moe_ep::memory {

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

int FileDescriptor::release() noexcept { return std::exchange(fd_, -1); }

void FileDescriptor::reset() noexcept {
  if (fd_ >= 0) close(release());
}

}  // namespace moe_ep::memory
