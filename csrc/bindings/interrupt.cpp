// Lets Ctrl-C, and every other Python signal handler that raises, end a wait inside an op.
#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "bindings/bindings.h"
#include "core/interrupt.h"

namespace py = pybind11;

namespace moe_ep::bindings {
namespace {

// What the handler raised, from the moment the wait saw it until the op raises it again: in between
// the wait returns through code that knows nothing of Python.
py::object& pending() {
  static py::object& exception = never_destroyed();
  return exception;
}

// Python runs signal handlers in this one alone.
bool is_main_thread() { return syscall(SYS_gettid) == getpid(); }

// Another thread does not even ask for the GIL: a daemon thread that does so while the interpreter
// ends is ended there, and takes the process with it ("terminate called ...").
bool interrupted() {
  if (!is_main_thread()) return false;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return false;
  pending() = py::error_already_set().value();
  return true;
}

}  // namespace

void bind_interrupt(py::module_& m) {
  m.def(
      "interrupt_check", [] { return reinterpret_cast<int64_t>(&interrupted); },
      "Address of the InterruptCheck that asks Python's signal handlers.");
  m.def(
      "take_interrupt",
      [] {
        py::object exception = pending() ? pending() : py::none();
        pending() = py::object();
        return exception;
      },
      "The exception that ended the last wait, or None.");
}

}  // namespace moe_ep::bindings
