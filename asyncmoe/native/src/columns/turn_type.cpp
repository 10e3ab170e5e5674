// The Python type of a turn.
#include "turn.h"

namespace columns {
namespace {

Turn& turn_of(PyObject* self) { return unboxed<Turn>(self); }

int init(PyObject* self, PyObject* arguments, PyObject*) {
    return guarded([&] {
        PyObject* workings;
        if (!PyArg_ParseTuple(arguments, "O", &workings)) throw py::error_already_set();
        turn_of(self).init(self, py::reinterpret_borrow<py::object>(workings));
        return 0;
    });
}

PyObject* hear(PyObject* self, PyObject*) {
    return guarded([&]() -> PyObject* {
        turn_of(self).hear();
        return py::none().release().ptr();
    });
}

PyObject* done(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    return guarded([&]() -> PyObject* {
        if (count != 3) throw py::type_error("done takes a result, an error and seconds");
        turn_of(self).done(arguments[0], arguments[1], arguments[2]);
        return py::none().release().ptr();
    });
}

PyObject* open(PyObject* self, PyObject* bell) {
    return guarded([&]() -> PyObject* {
        turn_of(self).bell = py::handle(bell).cast<std::shared_ptr<Bell>>();
        return py::none().release().ptr();
    });
}

PyObject* watch(PyObject* self, PyObject*) {
    return guarded([&]() -> PyObject* {
        turn_of(self).watch();
        return py::none().release().ptr();
    });
}

PyObject* close(PyObject* self, PyObject*) {
    return guarded([&]() -> PyObject* {
        turn_of(self).close();
        return py::none().release().ptr();
    });
}

PyMethodDef methods[] = {
    {"hear", hear, METH_NOARGS, nullptr},
    {"done", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(done)), METH_FASTCALL, nullptr},
    {"open", open, METH_O, nullptr},
    {"watch", watch, METH_NOARGS, nullptr},
    {"close", close, METH_NOARGS, nullptr},
    {},
};

}  // namespace

void bind_turn(py::module_& m) {
    add_box<Turn>(m, "asyncmoe.native._columns.Turn",
                  {{Py_tp_methods, methods}, {Py_tp_init, reinterpret_cast<void*>(init)}}, 0, true);
}

}  // namespace columns
