// Which process is it, and does it still run? For ranks of one host, to say of a silent one that it
// has ended.
#pragma once

#include <cstdint>

namespace moe_ep {

// A process id may be given to another process later, and means nothing in another namespace.
struct ProcessIdentity {
  int64_t pid;             // 0: unknown
  uint64_t started;        // when, by the kernel's clock; 0: unknown
  uint64_t pid_namespace;  // its inode; 0: unknown
};

ProcessIdentity own_process();

// Whether it is certain that the process has ended. A few system calls.
bool has_ended(const ProcessIdentity& process);

}  // namespace moe_ep
