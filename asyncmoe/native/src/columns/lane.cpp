#include "lane.h"

#include "timeline.h"

namespace columns {
namespace {

PyObject* handle_cancel(PyObject* self, PyObject*) {
    Handle& handle = unboxed<Handle>(self);
    if (!handle.cancelled) {
        handle.cancelled = true;
        const py::object callback = std::move(handle.callback), args = std::move(handle.args);
        if (handle.scheduled && handle.lane->timeline != nullptr) {
            handle.lane->timeline->note_cancelled();
        }
    }
    Py_RETURN_NONE;
}

PyObject* handle_cancelled(PyObject* self, PyObject*) {
    return PyBool_FromLong(unboxed<Handle>(self).cancelled);
}

PyObject* handle_when(PyObject* self, PyObject*) {
    return PyFloat_FromDouble(unboxed<Handle>(self).when_s);
}

// A number of seconds as a method's one argument.
bool seconds_of(PyObject* argument, double* seconds) {
    *seconds = PyFloat_AsDouble(argument);
    return *seconds != -1 || !PyErr_Occurred();
}

PyObject* lane_charge(PyObject* self, PyObject* argument) {
    double seconds;
    if (!seconds_of(argument, &seconds)) return nullptr;
    return PyFloat_FromDouble(unboxed<Lane>(self).charge(seconds));
}

PyObject* lane_compute(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    double before_s, seconds;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "compute() takes two numbers");
        return nullptr;
    }
    if (!seconds_of(arguments[0], &before_s) || !seconds_of(arguments[1], &seconds)) return nullptr;
    return PyFloat_FromDouble(unboxed<Lane>(self).compute(before_s, seconds));
}

PyObject* lane_counts(PyObject* self, PyObject* argument) {
    double seconds;
    if (!seconds_of(argument, &seconds)) return nullptr;
    unboxed<Lane>(self).counts(seconds);
    Py_RETURN_NONE;
}

PyObject* lane_clock(PyObject* self, PyObject*) {
    return PyFloat_FromDouble(unboxed<Lane>(self).clock());
}

PyObject* lane_kill(PyObject* self, PyObject*) {
    unboxed<Lane>(self).dead = true;
    unboxed<Lane>(self).kill();
    Py_RETURN_NONE;
}

PyMethodDef handle_methods[] = {
    {"cancel", handle_cancel, METH_NOARGS, "See `asyncio.Handle`."},
    {"cancelled", handle_cancelled, METH_NOARGS, "See `asyncio.Handle`."},
    {"when", handle_when, METH_NOARGS, "See `asyncio.TimerHandle`."},
    {},
};

PyMethodDef lane_methods[] = {
    {"charge", lane_charge, METH_O, nullptr},
    {"compute", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(lane_compute)),
     METH_FASTCALL, nullptr},
    {"counts", lane_counts, METH_O, nullptr},
    {"clock", lane_clock, METH_NOARGS, nullptr},
    {"kill", lane_kill, METH_NOARGS, nullptr},
    {},
};

PyGetSetDef lane_fields[] = {
    {"name", get_object<Lane, &Lane::name>, nullptr, nullptr, nullptr},
    {"costs", get_object<Lane, &Lane::costs>, nullptr, nullptr, nullptr},
    {"context", get_object<Lane, &Lane::context>, nullptr, nullptr, nullptr},
    {"dead", get_flag<Lane, &Lane::dead>, nullptr, nullptr, nullptr},
    {"free_s", get_number<Lane, &Lane::free_s>, nullptr, nullptr, nullptr},
    {"worked_s", get_number<Lane, &Lane::worked_s>, nullptr, nullptr, nullptr},
    {"hidden_s", get_number<Lane, &Lane::hidden_s>, nullptr, nullptr, nullptr},
    {"busy_until_s", get_number<Lane, &Lane::busy_until_s>, nullptr, nullptr, nullptr},
    {},
};

}  // namespace

int Handle::visit(visitproc visit, void* arg) {
    Py_VISIT(callback.ptr());
    Py_VISIT(args.ptr());
    Py_VISIT(context.ptr());
    return 0;
}

void Handle::clear() {
    const py::object one = std::move(callback), two = std::move(args), three = std::move(context);
}

void Due::drop() const {
    if (PyObject* mine = object()) {
        unboxed<Handle>(mine).scheduled = false;
        Py_DECREF(mine);
    }
    delete event();
}

int Due::visit(visitproc visit, void* arg) const {
    if (event() != nullptr) return event()->visit(visit, arg);
    Py_VISIT(object());
    return 0;
}

double Lane::charge(double seconds) {
    const double begin_s = timeline == nullptr ? free_s : std::max(free_s, timeline->now_s);
    if (seconds == 0) return begin_s;
    const double end_s = begin_s + seconds;
    free_s = end_s;
    worked_s += seconds;
    if (begin_s < busy_until_s && end_s > busy_from_s) {
        hidden_s += std::min(end_s, busy_until_s) - std::max(begin_s, busy_from_s);
    }
    return end_s;
}

double Lane::compute(double before_s, double seconds) {
    double begin_s = charge(before_s);
    if (begin_s < busy_until_s) {
        begin_s = busy_until_s;
    } else {
        busy_from_s = begin_s;
    }
    busy_until_s = begin_s + seconds;
    return busy_until_s;
}

void Lane::kill() {
    while (!ready.empty()) ready.pop().drop();
}

int Lane::visit(visitproc visit, void* arg) {
    Py_VISIT(loop.ptr());
    Py_VISIT(name.ptr());
    Py_VISIT(costs.ptr());
    Py_VISIT(context.ptr());
    for (size_t i = 0; i < ready.size(); ++i) {
        const int stop = ready[i].visit(visit, arg);
        if (stop != 0) return stop;
    }
    return 0;
}

void Lane::clear() {
    kill();
    timeline = nullptr;
    const py::object one = std::move(costs), two = std::move(context), three = std::move(loop);
}

void bind_lane(py::module_& m) {
    add_box<Handle>(m, "asyncmoe.native._columns.Handle", {{Py_tp_methods, handle_methods}});
    add_box<Lane>(m, "asyncmoe.native._columns.Lane",
                  {{Py_tp_methods, lane_methods}, {Py_tp_getset, lane_fields}});
}

}  // namespace columns
