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

FileDescriptor FileDescriptor::duplicate() const {
  const int fd = fcntl(fd_, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) throw_system_error("cannot duplicate a file descriptor");
  return FileDescriptor(fd);
}

}  // namespace moe_ep::memory
