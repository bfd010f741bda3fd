// The extension module moe_ep._native: the control plane. Nothing here runs in a round.
#include <pybind11/pybind11.h>

#include <system_error>

#include "bindings/bindings.h"

namespace py = pybind11;

PYBIND11_MODULE(_native, m) {
  m.doc() = "Control plane of moe_ep: shared memory, layout queries, interrupts, errors.";
  // As Python's own functions do: OSError with errno, so that a passed deadline is a TimeoutError.
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const std::system_error& error) {
      const py::tuple arguments = py::make_tuple(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });
  moe_ep::bindings::bind_memory(m);
  moe_ep::bindings::bind_layout(m);
  moe_ep::bindings::bind_interrupt(m);
  moe_ep::bindings::bind_errors(m);
}
