// How ops fail: with a message that starts with the name of the Python error that it stands for. In
// a process with Python the op raises that error; in one without, a runtime_error has the message.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

namespace moe_ep::ops {

// address: of an ErrorRaiser for all ops of this process; 0: none.
void set_error_raiser(int64_t address);

[[noreturn]] void raise(const std::string& message);

template <typename... Parts>
[[noreturn]] void fail(const char* error, const Parts&... parts) {
  std::ostringstream message;
  message << error << ": ";
  (message << ... << parts);
  raise(message.str());
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
