#include "stopwatch.h"

#include "clock.h"

namespace columns {
namespace {

Stopwatch& stopwatch_of(PyObject* self) { return unboxed<Stopwatch>(self); }

int init(PyObject* self, PyObject* arguments, PyObject*) {
    return guarded([&] {
        PyObject* names;
        if (!PyArg_ParseTuple(arguments, "O", &names)) throw py::error_already_set();
        Stopwatch& watch = stopwatch_of(self);
        watch.names = py::reinterpret_borrow<py::object>(names);
        watch.begin_s = watch.last_s = monotonic_s();
        return 0;
    });
}

PyObject* on_event(PyObject* self, PyObject* arguments, PyObject*) {
    return guarded([&]() -> PyObject* {
        PyObject *time, *lane, *callback;
        if (!PyArg_ParseTuple(arguments, "OOO", &time, &lane, &callback)) {
            throw py::error_already_set();
        }
        stopwatch_of(self).begin(callback);
        return py::none().release().ptr();
    });
}

PyObject* within(PyObject* self, PyObject* argument) {
    const double seconds = PyFloat_AsDouble(argument);
    if (seconds == -1 && PyErr_Occurred()) return nullptr;
    stopwatch_of(self).within_s += seconds;
    Py_RETURN_NONE;
}

PyObject* share(PyObject* self, PyObject*) {
    Stopwatch& watch = stopwatch_of(self);
    watch.close();
    return PyFloat_FromDouble(watch.counted_s / (watch.last_s - watch.begin_s));
}

PyMethodDef methods[] = {
    {"within", within, METH_O, nullptr},
    {"share", share, METH_NOARGS, nullptr},
    {},
};

}  // namespace

void Stopwatch::begin(PyObject* callback) {
    static PyObject* const qualname = PyUnicode_InternFromString("__qualname__");
    close();
    PyObject* name = PyObject_GetAttr(callback, qualname);
    if (name == nullptr) PyErr_Clear();
    const int found = name == nullptr ? 0 : PySet_Contains(names.ptr(), name);
    Py_XDECREF(name);
    if (found < 0) throw py::error_already_set();
    counts = found != 0;
}

void Stopwatch::close() {
    const double time_s = monotonic_s();
    counted_s += counts ? time_s - last_s : within_s;
    last_s = time_s;
    within_s = 0;
}

void bind_stopwatch(py::module_& m) {
    add_box<Stopwatch>(m, "asyncmoe.native._columns.Stopwatch",
                       {{Py_tp_methods, methods},
                        {Py_tp_init, reinterpret_cast<void*>(init)},
                        {Py_tp_call, reinterpret_cast<void*>(on_event)}},
                       0, true);
}

}  // namespace columns
