// The Python type of a turn.
#include "turn.h"

#include "numbers.h"

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

PyObject* passed(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    return guarded([&]() -> PyObject* {
        if (count != 2 || !PyList_Check(arguments[0])) {
            throw py::type_error("passed takes a list of stages and rows");
        }
        const auto stages = py::reinterpret_borrow<py::list>(arguments[0]);
        turn_of(self).passed(stages, whole(arguments[1]));
        return py::none().release().ptr();
    });
}

PyObject* note(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    return guarded([&]() -> PyObject* {
        if (count != 2) throw py::type_error("note takes a stage and rows");
        turn_of(self).note(whole(arguments[0]), whole(arguments[1]));
        return py::none().release().ptr();
    });
}

PyObject* submit(PyObject* self, PyObject* step) {
    return guarded([&]() -> PyObject* {
        turn_of(self).submit(py::reinterpret_borrow<py::object>(step));
        return py::none().release().ptr();
    });
}

PyObject* tell(PyObject* self, PyObject*) {
    return guarded([&]() -> PyObject* {
        turn_of(self).tell();
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
    {"passed", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(passed)), METH_FASTCALL,
     nullptr},
    {"note", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(note)), METH_FASTCALL, nullptr},
    {"submit", submit, METH_O, nullptr},
    {"tell", tell, METH_NOARGS, nullptr},
    {"close", close, METH_NOARGS, nullptr},
    {},
};

}  // namespace

void bind_turn(py::module_& m) {
    add_box<Turn>(m, "asyncmoe.native._columns.Turn",
                  {{Py_tp_methods, methods}, {Py_tp_init, reinterpret_cast<void*>(init)}}, 0, true);
}

}  // namespace columns
