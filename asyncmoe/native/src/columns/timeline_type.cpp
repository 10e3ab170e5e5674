// What Python sees of virtual time: the base class of asyncio's loop on it.
#include "stopwatch.h"
#include "timeline.h"

namespace columns {
namespace {

Timeline& timeline_of(PyObject* self) { return unboxed<Timeline>(self); }

// The one keyword that there may be; null where it is not given or None.
PyObject* context_of(PyObject* const* arguments, Py_ssize_t count, PyObject* keywords) {
    if (keywords == nullptr || PyTuple_GET_SIZE(keywords) == 0) return nullptr;
    if (PyTuple_GET_SIZE(keywords) != 1 ||
        PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(keywords, 0), "context") != 0) {
        throw py::type_error("the only keyword is context");
    }
    return arguments[count] == Py_None ? nullptr : arguments[count];
}

// A callback with its arguments, in its context and lane.
Ref<Handle> handle_of(Timeline& timeline, PyObject* const* arguments, Py_ssize_t count,
                      PyObject* context) {
    auto handle = Ref<Handle>::make();
    handle->lane = &timeline.lane_of(context);
    handle->callback = py::reinterpret_borrow<py::object>(arguments[0]);
    py::tuple args(count - 1);
    for (Py_ssize_t i = 1; i < count; ++i) {
        Py_INCREF(arguments[i]);
        PyTuple_SET_ITEM(args.ptr(), i - 1, arguments[i]);
    }
    handle->args = std::move(args);
    if (context == nullptr) {
        PyObject* present = PyContext_CopyCurrent();
        if (present == nullptr) throw py::error_already_set();
        handle->context = py::reinterpret_steal<py::object>(present);
    } else {
        handle->context = py::reinterpret_borrow<py::object>(context);
    }
    return handle;
}

PyObject* call_soon(PyObject* self, PyObject* const* arguments, Py_ssize_t count,
                    PyObject* keywords) {
    return guarded([&]() -> PyObject* {
        if (count < 1) throw py::type_error("call_soon() needs a callback");
        Timeline& timeline = timeline_of(self);
        PyObject* context = context_of(arguments, count, keywords);
        Ref<Handle> handle = handle_of(timeline, arguments, count, context);
        handle->when_s = timeline.now_s;
        timeline.ready(*handle->lane, Due::of(handle));
        return handle.release();
    });
}

PyObject* set_timer(PyObject* self, double from_s, PyObject* const* arguments, Py_ssize_t count,
                    PyObject* keywords) {
    return guarded([&]() -> PyObject* {
        if (count < 2) throw py::type_error("a timer needs a time and a callback");
        Timeline& timeline = timeline_of(self);
        const double seconds = PyFloat_AsDouble(arguments[0]);
        if (seconds == -1 && PyErr_Occurred()) throw py::error_already_set();
        PyObject* context = context_of(arguments, count, keywords);
        Ref<Handle> handle = handle_of(timeline, arguments + 1, count - 1, context);
        handle->when_s = from_s + seconds;
        handle->scheduled = true;
        timeline.at(handle->when_s, Due::of(handle));
        return handle.release();
    });
}

PyObject* call_at(PyObject* self, PyObject* const* arguments, Py_ssize_t count,
                  PyObject* keywords) {
    return set_timer(self, 0.0, arguments, count, keywords);
}

PyObject* call_later(PyObject* self, PyObject* const* arguments, Py_ssize_t count,
                     PyObject* keywords) {
    return set_timer(self, timeline_of(self).now_s, arguments, count, keywords);
}

PyObject* time(PyObject* self, PyObject*) { return PyFloat_FromDouble(timeline_of(self).now_s); }

PyObject* lane(PyObject* self, PyObject* arguments) {
    return guarded([&]() -> PyObject* {
        PyObject *name, *costs = Py_None;
        if (!PyArg_ParseTuple(arguments, "O|O", &name, &costs)) throw py::error_already_set();
        timeline_of(self).check_set_up();
        return timeline_of(self).lane(name, costs).object().inc_ref().ptr();
    });
}

PyObject* set_up(PyObject* self, PyObject* arguments) {
    return guarded([&]() -> PyObject* {
        PyObject* draw;
        Timeline& timeline = timeline_of(self);
        if (!PyArg_ParseTuple(arguments, "Od", &draw, &timeline.slack_s)) {
            throw py::error_already_set();
        }
        timeline.self = self;
        timeline.variable = py::module_::import("asyncmoe.virtual.loop").attr("LANE");
        timeline.draw = py::reinterpret_borrow<py::object>(draw);
        timeline.on_event = py::none();
        timeline.lane(py::str("main"), py::none());
        return py::none().inc_ref().ptr();
    });
}

PyObject* run_once(PyObject* self, PyObject*) {
    return guarded([&]() -> PyObject* {
        timeline_of(self).run();
        return py::none().inc_ref().ptr();
    });
}

PyObject* get_main(PyObject* self, void*) {
    return guarded([&]() -> PyObject* {
        timeline_of(self).check_set_up();
        return timeline_of(self).lanes.front().object().inc_ref().ptr();
    });
}

PyObject* get_events(PyObject* self, void*) {
    return PyLong_FromLongLong(timeline_of(self).events);
}

PyObject* get_timers(PyObject* self, void*) {
    return PyLong_FromSize_t(timeline_of(self).timers.size());
}

template <typename F>
PyCFunction method(F* function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

constexpr int kFast = METH_FASTCALL | METH_KEYWORDS;

PyMethodDef methods[] = {
    {"call_soon", method(call_soon), kFast, "See asyncio."},
    {"call_at", method(call_at), kFast, "See asyncio. A time that is past counts as now."},
    {"call_later", method(call_later), kFast, "See asyncio."},
    {"time", time, METH_NOARGS, nullptr},
    {"lane", lane, METH_VARARGS, nullptr},
    {"_set_up", set_up, METH_VARARGS, nullptr},
    {"_run_once", run_once, METH_NOARGS, nullptr},
    {},
};

PyGetSetDef fields[] = {
    {"now_s", get_number<Timeline, &Timeline::now_s>, nullptr, nullptr, nullptr},
    {"events", get_events, nullptr, nullptr, nullptr},
    {"timers", get_timers, nullptr, nullptr, nullptr},
    {"main", get_main, nullptr, nullptr, nullptr},
    {"on_event", get_object<Timeline, &Timeline::on_event>,
     set_object<Timeline, &Timeline::on_event>, nullptr, nullptr},
    {"_stopping", get_flag<Timeline, &Timeline::stopping>, set_flag<Timeline, &Timeline::stopping>,
     nullptr, nullptr},
    {},
};

}  // namespace

void bind_timeline(py::module_& m) {
    bind_lane(m);
    bind_stopwatch(m);
    add_box<Timeline>(m, "asyncmoe.native._columns.Timeline",
                      {{Py_tp_methods, methods}, {Py_tp_getset, fields}}, Py_TPFLAGS_BASETYPE,
                      true);
}

}  // namespace columns
