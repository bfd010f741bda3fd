// The memory of CPUs as a MemoryKind: memfd for physical memory, mmap for addresses, file
// descriptors as handles. Nothing has a name in a file system: what a process leaves behind goes
// with it, and a small or missing /dev/shm does not matter.
#pragma once

#include "memory/memory_kind.h"

namespace moe_ep::memory {

// Stateless; lives as long as the program.
MemoryKind& host_memory();

}  // namespace moe_ep::memory
