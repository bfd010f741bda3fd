// The op that tells which of the kernels' code a device would run.
#include "transport/compiled_code.h"

#include <torch/csrc/stable/library.h>

#include <cstdint>

namespace moe_ep::ops {
namespace {

int64_t code_capability(int64_t device_capability) {
  return moe_ep::code_capability(static_cast<int>(device_capability));
}

}  // namespace

// It has no tensor argument to choose a device by.
STABLE_TORCH_LIBRARY_IMPL(moe_ep, CompositeExplicitAutograd, m) {
  m.impl("code_capability", TORCH_BOX(&code_capability));
}

}  // namespace moe_ep::ops
