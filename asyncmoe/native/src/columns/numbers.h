// Python's numbers. Raises what Python raises for anything else.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace columns {

inline int64_t whole(PyObject* number) {
    const int64_t value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred()) throw pybind11::error_already_set();
    return value;
}

inline double real(PyObject* number) {
    const double value = PyFloat_AsDouble(number);
    if (value == -1.0 && PyErr_Occurred()) throw pybind11::error_already_set();
    return value;
}

}  // namespace columns
