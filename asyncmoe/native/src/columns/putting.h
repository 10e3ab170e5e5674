// How work gets to a compute thread without Python.
#pragma once

#include <pybind11/pybind11.h>

namespace columns {

namespace py = pybind11;

// A function of two arguments: `put` is called with both and `third`, as one tuple.
py::object putting(py::object put, py::object third);

}  // namespace columns
