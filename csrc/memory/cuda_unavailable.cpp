// In place of cuda_memory.cpp where the build had no CUDA toolkit: sizes can be told, memory cannot
// be had.
#include <stdexcept>

#include "memory/cuda_memory.h"

namespace moe_ep::memory {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error(
      "this moe_ep was built without CUDA. Build it again where torch has CUDA and its toolkit is "
      "found (CUDA_HOME can name the folder with bin/nvcc and include/cuda.h)");
}

class NoCudaMemory final : public MemoryKind {
 public:
  uint64_t granularity() const override { return kCudaGranularity; }

  std::byte* reserve(uint64_t) override { refuse(); }
  PhysicalId create(uint64_t, HandleForm) override { refuse(); }
  ShareableHandle export_handle(PhysicalId, uint64_t, HandleForm) override { refuse(); }
  PhysicalId import_handle(ShareableHandle) override { refuse(); }
  void map(std::byte*, uint64_t, PhysicalId) override { refuse(); }
  void unmap(std::byte*, uint64_t) override { refuse(); }

  // Nothing was ever made.
  void free_reserved(std::byte*, uint64_t) noexcept override {}
  void destroy(PhysicalId) noexcept override {}
};

}  // namespace

MemoryKind& cuda_memory(int) {
  static NoCudaMemory memory;
  return memory;
}

CudaDevice cuda_device(int) { refuse(); }
std::string reason_against(int, HandleForm) { refuse(); }
std::optional<bool> can_access_peer(int, const std::string&) { refuse(); }

}  // namespace moe_ep::memory
