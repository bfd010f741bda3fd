// How much memory this process may still take, so that too large a request is an error, not an
// out-of-memory kill.
#pragma once

#include <cstdint>

namespace moe_ep::memory {

struct AvailableMemory {
  // The least of what the machine has left (swap included) and what each control group allows.
  // UINT64_MAX where the system does not say.
  uint64_t bytes;
  // Processes with the same scope draw on the same bytes: the machine (0) or a control group.
  uint64_t scope;
};

AvailableMemory available_memory();

}  // namespace moe_ep::memory
