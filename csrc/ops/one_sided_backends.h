// Which backends are on the one-sided transport: they have the same ops, and differ in which way a
// step goes on CUDA.
#pragma once

#include <string>

namespace moe_ep::ops {

// What the names of their ops begin with.
inline constexpr char kCake[] = "cake";
inline constexpr char kOneSided[] = "one_sided";
inline constexpr const char* kOneSidedBackends[] = {kCake, kOneSided};

inline std::string op_of(const char* backend, const char* name) {
  return std::string(backend) + "_" + name;
}

// What is the same for all of them, under each of their names.
template <typename Library, typename Op>
void implement_for_each(Library& library, const char* name, Op boxed) {
  for (const char* backend : kOneSidedBackends) {
    library.impl(op_of(backend, name).c_str(), boxed);
  }
}

}  // namespace moe_ep::ops
