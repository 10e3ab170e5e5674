#include "function.h"

#include "names.h"

namespace columns {

py::object ByKey::operator()(PyObject* const* arguments) const {
    const py::handle key(arguments[0]), argument(arguments[1]);
    PyObject* const found = PyDict_GetItemWithError(table.ptr(), key.ptr());
    if (found != nullptr) return call(py::reinterpret_borrow<py::object>(found), argument);
    if (PyErr_Occurred()) throw py::error_already_set();
    return call(otherwise, key, argument);
}

py::object by_key(py::dict table, py::object otherwise) {
    return function<2>(ByKey{std::move(table), std::move(otherwise)});
}

}  // namespace columns
