// How this folder reports that the operating system refused something.
#pragma once

#include <cerrno>
#include <string>
#include <system_error>

namespace moe_ep::memory {

// errno's reason behind `what`, which names the operation, what was wanted and what was got.
[[noreturn]] inline void throw_system_error(const std::string& what, int error = errno) {
  throw std::system_error(error, std::generic_category(), what);
}

}  // namespace moe_ep::memory
