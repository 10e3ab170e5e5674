// Lets Python's garbage collector see the Python objects that a compiled object refers to, so that
// a rank whose parts refer to each other goes away with all of them.
#pragma once

#include <pybind11/pybind11.h>

namespace columns {

namespace py = pybind11;

// For a class with `template <typename F> void each_reference(F visit)`, which calls `visit` with
// every `py::object&` that may be part of a cycle. To be given to `py::class_`.
template <typename T>
py::custom_type_setup collected() {
    return py::custom_type_setup([](PyHeapTypeObject* heap_type) {
        PyTypeObject* type = &heap_type->ht_type;
        type->tp_flags |= Py_TPFLAGS_HAVE_GC;
        type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
            Py_VISIT(Py_TYPE(self));
            if (!py::detail::is_holder_constructed(self)) return 0;
            int stopped = 0;
            py::cast<T&>(py::handle(self)).each_reference([&](py::object& reference) {
                if (stopped == 0 && reference.ptr() != nullptr) {
                    stopped = visit(reference.ptr(), arg);
                }
            });
            return stopped;
        };
        type->tp_clear = [](PyObject* self) {
            if (py::detail::is_holder_constructed(self)) {
                py::cast<T&>(py::handle(self)).each_reference([](py::object& reference) {
                    py::object gone = std::move(reference);
                    reference = py::none();
                });
            }
            return 0;
        };
    });
}

}  // namespace columns
