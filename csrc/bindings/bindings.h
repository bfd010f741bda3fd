// What each file of this folder adds to the extension module moe_ep._native.
#pragma once

#include <pybind11/pybind11.h>

namespace moe_ep::bindings {

// A Python object that a module keeps, at first none. Not destroyed: the interpreter may be gone by
// then. Guarded by the GIL.
inline pybind11::object& never_destroyed() { return *new pybind11::object(); }

void bind_memory(pybind11::module_& m);
void bind_layout(pybind11::module_& m);
void bind_interrupt(pybind11::module_& m);
void bind_errors(pybind11::module_& m);

}  // namespace moe_ep::bindings
