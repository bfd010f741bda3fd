// Lets an op's error leave it as the Python error that it stands for. torch has its C++ code throw
// that kind of exception wherever Python has raised, and so passes it on from everywhere: out of
// the dispatcher, autograd, and the code of a compiled graph, where no Python of the library is
// left that could translate another.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>

#include "bindings/bindings.h"
#include "core/error_raiser.h"
#include "transport/outcome.h"

namespace py = pybind11;

namespace moe_ep::bindings {
namespace {

// From a message to an exception or None.
py::object& maker() {
  static py::object& callable = never_destroyed();
  return callable;
}

void raise_in_python(const char* message) {
  if (Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  if (!maker()) return;
  const py::object error = maker()(message);
  if (error.is_none()) return;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

}  // namespace

void bind_errors(py::module_& m) {
  m.def(
      "set_error_maker", [](py::object callable) { maker() = std::move(callable); },
      py::arg("maker"), "Says what makes an exception, or None, of an op's message.");
  m.def(
      "error_raiser", [] { return reinterpret_cast<int64_t>(&raise_in_python); },
      "Address of the ErrorRaiser that raises what the maker makes.");
  m.def("abandoned_message", &abandoned_message, py::arg("ranks"),
        "What MoEEpAbandonedError says.");
}

}  // namespace moe_ep::bindings
