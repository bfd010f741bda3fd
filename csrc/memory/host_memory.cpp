#include "memory/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "memory/available_memory.h"
#include "memory/system_error.h"

namespace moe_ep::memory {
namespace {

// Linux 6.3. Older C libraries do not name it, older kernels answer EINVAL. Newer kernels can be
// set up to refuse a memfd that does not say whether its contents may be executed.
constexpr unsigned kNoExecSeal = 0x0008U;

// The size is final: a peer that could shrink the file would turn our accesses into SIGBUS.
constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

int as_descriptor(PhysicalId id) { return static_cast<int>(id); }

PhysicalId as_id(FileDescriptor descriptor) {
  return PhysicalId{static_cast<uint64_t>(descriptor.release())};
}

FileDescriptor open_memfd() {
  constexpr const char* kName = "moe_ep";  // what /proc shows; need not be unique
  int fd = memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal);
  if (fd < 0 && errno == EINVAL) fd = memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw_system_error("memfd_create refuses a new memory object");
  return FileDescriptor(fd);
}

class HostMemory final : public MemoryKind {
 public:
  uint64_t granularity() const override {
    static const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    return page;
  }

  // Readable, never writable: what stays empty behind a segment must stop an overrun, but a
  // compiler that clones the workspace reads across it, and must get as far as the op that refuses
  // the clone.
  std::byte* reserve(uint64_t bytes) override {
    void* base =
        mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
      throw_system_error("cannot reserve " + std::to_string(bytes) +
                         " bytes of address space (is `ulimit -v` set?)");
    }
    return static_cast<std::byte*>(base);
  }

  void free_reserved(std::byte* base, uint64_t bytes) noexcept override { munmap(base, bytes); }

  PhysicalId create(uint64_t bytes, HandleForm form) override {
    require_descriptor(form);
    // The kernel does not refuse a memfd that is too large: it kills a process when memory runs
    // out.
    const AvailableMemory available = available_memory();
    if (bytes > available.bytes) {
      throw_system_error("a segment needs " + std::to_string(bytes) + " bytes of memory, " +
                             std::to_string(available.bytes) + " are available",
                         ENOMEM);
    }
    FileDescriptor file = open_memfd();
    // Takes every page now: with ftruncate alone, a later write could end in SIGBUS.
    int result;
    do {
      result = fallocate(file.get(), 0, 0, static_cast<off_t>(bytes));
    } while (result != 0 && errno == EINTR);
    if (result != 0) {
      throw_system_error("cannot allocate " + std::to_string(bytes) + " bytes of shared memory");
    }
    if (fcntl(file.get(), F_ADD_SEALS, kSizeSeals) != 0) {
      throw_system_error("cannot fix the size of a shared memory object");
    }
    return as_id(std::move(file));
  }

  void destroy(PhysicalId id) noexcept override { FileDescriptor(as_descriptor(id)).reset(); }

  ShareableHandle export_handle(PhysicalId id, uint64_t bytes, HandleForm form) override {
    require_descriptor(form);
    const int fd = fcntl(as_descriptor(id), F_DUPFD_CLOEXEC, 0);
    if (fd < 0) throw_system_error("cannot export a handle of shared memory");
    return ShareableHandle(FileDescriptor(fd), bytes);
  }

  PhysicalId import_handle(ShareableHandle handle) override {
    require_descriptor(handle.form());
    struct stat status{};
    if (fstat(handle.descriptor(), &status) != 0) {
      throw_system_error("cannot import a handle of shared memory");
    }
    const auto bytes = static_cast<uint64_t>(status.st_size);
    const int seals = fcntl(handle.descriptor(), F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || bytes != handle.bytes()) {
      throw std::runtime_error("a handle says that it stands for " +
                               std::to_string(handle.bytes()) +
                               " bytes of shared memory of fixed size, got a file of " +
                               std::to_string(bytes) + " bytes, seals " + std::to_string(seals));
    }
    return as_id(std::move(handle).take_descriptor());
  }

  void map(std::byte* at, uint64_t bytes, PhysicalId id) override {
    // The pages exist; MAP_POPULATE enters them now. Left to the first round, the faults took 30 ms
    // for 60 MiB, twice the time of the round; populated 4 ms, once.
    replace(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, as_descriptor(id));
  }

  void unmap(std::byte* at, uint64_t bytes) override {
    replace(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
  }

 private:
  static void require_descriptor(HandleForm form) {
    if (form == HandleForm::kFileDescriptor) return;
    throw std::invalid_argument(
        std::string("the memory of CPUs is shared by file descriptors, got a ") + name_of(form));
  }

  // One system call, so that no other thread's mmap can get hold of the addresses in between.
  static void replace(std::byte* at, uint64_t bytes, int protection, int flags, int fd) {
    if (mmap(at, bytes, protection, flags | MAP_FIXED, fd, 0) == MAP_FAILED) {
      throw_system_error(std::string(fd >= 0 ? "cannot map " : "cannot unmap ") +
                         std::to_string(bytes) + " bytes of shared memory");
    }
  }
};

}  // namespace

MemoryKind& host_memory() {
  static HostMemory memory;
  return memory;
}

}  // namespace moe_ep::memory
