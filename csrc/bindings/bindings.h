// What each file of this folder adds to the extension module moe_ep._native.
#pragma once

#include <pybind11/pybind11.h>

namespace moe_ep::bindings {

void bind_memory(pybind11::module_& m);
void bind_layout(pybind11::module_& m);
void bind_interrupt(pybind11::module_& m);
void bind_errors(pybind11::module_& m);

}  // namespace moe_ep::bindings
