#include "ops/errors.h"

#include <torch/csrc/stable/library.h>

#include <atomic>
#include <stdexcept>

#include "core/error_raiser.h"

namespace moe_ep::ops {
namespace {

std::atomic<ErrorRaiser> error_raiser{nullptr};

}  // namespace

void set_error_raiser(int64_t address) { error_raiser = reinterpret_cast<ErrorRaiser>(address); }

void raise(const std::string& message) {
  if (const ErrorRaiser raise_in_python = error_raiser) raise_in_python(message.c_str());
  throw std::runtime_error(message);
}

// It has no tensor argument to choose a device by.
STABLE_TORCH_LIBRARY_IMPL(moe_ep, CompositeExplicitAutograd, m) {
  m.impl("set_error_raiser", TORCH_BOX(&set_error_raiser));
}

}  // namespace moe_ep::ops
