#include "putting.h"

#include <utility>

#include "function.h"
#include "names.h"

namespace columns {

py::object putting(py::object put, py::object third) {
    return function<2>([put = std::move(put),
                        third = std::move(third)](PyObject* const* arguments) {
        PyObject* const item = PyTuple_Pack(3, arguments[0], arguments[1], third.ptr());
        if (item == nullptr) throw py::error_already_set();
        return call(put, py::reinterpret_steal<py::object>(item));
    });
}

}  // namespace columns
