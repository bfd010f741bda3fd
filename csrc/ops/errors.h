// How ops fail: one exception, whose message starts with the name of the Python error that it
// stands for. The Python layer raises that error; compiled graphs show the message in a
// RuntimeError.
#pragma once

#include <sstream>
#include <stdexcept>

namespace moe_ep::ops {

template <typename... Parts>
[[noreturn]] void fail(const char* error, const Parts&... parts) {
  std::ostringstream message;
  message << error << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// For what the caller passed.
template <typename... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) fail("MoEEpConfigError", parts...);
}

// For dtypes, as torch has it.
template <typename... Parts>
void check_dtype(bool condition, const Parts&... parts) {
  if (!condition) fail("TypeError", parts...);
}

// For calls in the wrong order.
template <typename... Parts>
void check_state(bool condition, const Parts&... parts) {
  if (!condition) fail("MoEEpStateError", parts...);
}

}  // namespace moe_ep::ops
