// What the compiled half of the protocol uses of the Python half.
#pragma once

#include "prelude.h"

namespace columns {

struct Names {
    py::object arrival, parcel, packed_parcel, posted, tensor;  // classes
    PyTypeObject* tensor_type;
    py::object kinds[kClasses], dtypes[kDtypes + 1];     // by class, by code
    py::object lease_states;                             // tuple, in order
    py::object pack, rows_of, encode_parcel, decode_prelude, check_parcel, refuse_order,
        refuse_place, report_fault;
    PyObject* protocol_error;
};

// Looked up on first use, when the modules are there, and kept for the life of the process.
const Names& names();

// An attribute of a Python object. Raises what Python raises.
inline py::object get(py::handle object, PyObject* name) {
    PyObject* value = PyObject_GetAttr(object.ptr(), name);
    if (value == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
}

inline void set(py::handle object, PyObject* name, py::handle value) {
    if (PyObject_SetAttr(object.ptr(), name, value.ptr()) != 0) throw py::error_already_set();
}

// The length of a Python object; that of a deque is read off it.
inline Py_ssize_t length_of(const py::object& object) {
    static PyTypeObject* const deque = reinterpret_cast<PyTypeObject*>(
        py::object(py::module_::import("collections").attr("deque")).release().ptr());
    if (Py_IS_TYPE(object.ptr(), deque)) return Py_SIZE(object.ptr());
    const Py_ssize_t length = PyObject_Size(object.ptr());
    if (length < 0) throw py::error_already_set();
    return length;
}

// A new instance of a Python class with slots alone, as its `__new__` makes it.
inline py::object blank(py::handle type) {
    auto* of = reinterpret_cast<PyTypeObject*>(type.ptr());
    PyObject* made = of->tp_alloc(of, 0);
    if (made == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
}

// `callee(arguments...)`, without pybind11's detours.
template <typename... Arguments>
py::object call(py::handle callee, Arguments... arguments) {
    PyObject* of[] = {nullptr, arguments.ptr()...};
    PyObject* result = PyObject_Vectorcall(
        callee.ptr(), of + 1, sizeof...(Arguments) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
}

}  // namespace columns
