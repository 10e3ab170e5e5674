#include "timeline.h"

#include <limits>

#include "stopwatch.h"

namespace columns {
namespace {

constexpr long long kMany = 100;  // cancelled timers from which on it is worth to sweep them out

bool is_cancelled(const Due& due) {
    const Handle* handle = due.handle();
    return handle != nullptr && handle->cancelled;
}

py::object owned(PyObject* object) {
    if (object == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(object);
}

// Runs `body` in a context; false if an exception is set.
template <typename F>
bool within(PyObject* context, F body) {
    if (PyContext_Enter(context) != 0) return false;
    bool is_good;
    try {
        is_good = body();
    } catch (py::error_already_set& error) {
        error.restore();
        is_good = false;
    }
    return PyContext_Exit(context) == 0 && is_good;
}

}  // namespace

const Ref<Lane>& Timeline::lane(py::handle name, py::handle costs) {
    auto made = Ref<Lane>::make();
    made->timeline = this;
    made->loop = py::reinterpret_borrow<py::object>(self);
    made->name = py::reinterpret_borrow<py::object>(name);
    made->costs = py::reinterpret_borrow<py::object>(costs);
    made->context = owned(PyContext_CopyCurrent());
    made->context.attr("run")(variable.attr("set"), made.object());
    lanes.push_back(std::move(made));
    return lanes.back();
}

Lane& Timeline::lane_of(PyObject* context) {
    check_set_up();
    static PyObject* const get = PyUnicode_InternFromString("get");
    PyObject* found = nullptr;
    if (context == nullptr) {
        if (PyContextVar_Get(variable.ptr(), Py_None, &found) != 0) throw py::error_already_set();
    } else {
        PyObject* of[] = {nullptr, context, variable.ptr()};
        found = PyObject_VectorcallMethod(get, of + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
    }
    const py::object value = owned(found);
    const bool is_ours = Ref<Lane>::is(value) && unboxed<Lane>(found).timeline == this;
    return is_ours ? unboxed<Lane>(found) : *lanes.front();
}

void Timeline::ready(Lane& lane, Due due) {
    if (lane.dead) return due.drop();
    lane.ready.push(due);
    if (lane.queued) return;
    lane.queued = true;
    turns.push(&lane);
}

void Timeline::note_cancelled() {
    ++dropped;
    if (dropped <= kMany || 2 * dropped <= static_cast<long long>(timers.size())) return;
    std::vector<Timer> left, gone;
    for (const Timer& timer : timers) (is_cancelled(timer.due) ? gone : left).push_back(timer);
    timers.swap(left);
    std::make_heap(timers.begin(), timers.end());
    dropped = 0;
    for (const Timer& timer : gone) timer.due.drop();
}

void Timeline::run() {
    check_set_up();
    while (!stopping) {
        if (!turns.empty()) {
            if (!draw.is_none() && turns.size() > 1) {
                const double drawn = PyFloat_AsDouble(columns::call(draw).ptr());
                turns.rotate(static_cast<size_t>(drawn * static_cast<double>(turns.size())));
            }
            turn(*turns.pop());
            continue;
        }
        if (timers.empty() || timers.front().when_s == std::numeric_limits<double>::infinity()) {
            py::handle(self).attr("_stand_still")();
            throw std::logic_error("a loop that stands still goes on");
        }
        const double when_s = timers.front().when_s;
        if (!take_out()) continue;
        if (when_s > now_s) now_s = when_s;
        if (draw.is_none()) continue;
        // All timers of this very moment, so that the choice is among all of them.
        while (!timers.empty() && timers.front().when_s <= now_s) take_out();
    }
}

// Makes the first timer ready; false if it is void.
bool Timeline::take_out() {
    std::pop_heap(timers.begin(), timers.end());
    const Due due = timers.back().due;
    timers.pop_back();
    if (due.lane() != nullptr) {
        turns.push(due.lane());
        return true;
    }
    if (is_cancelled(due)) {
        --dropped;
        due.drop();
        return false;
    }
    if (due.handle() != nullptr) due.handle()->scheduled = false;
    Lane& lane = due.event() != nullptr ? due.event()->lane() : *due.handle()->lane;
    const bool lives = !lane.dead;
    ready(lane, due);
    return lives;
}

// Runs the first of a lane's callbacks.
void Timeline::turn(Lane& lane) {
    if (lane.free_s - slack_s > now_s) {  // look at it again when its host is free
        at(lane.free_s - slack_s, Due::of(&lane));
        return;
    }
    const auto go_on = [&] {
        lane.queued = !lane.ready.empty();
        if (lane.queued) turns.push(&lane);
    };
    if (!lane.ready.empty()) {  // else it died
        const Due due = lane.ready.pop();
        try {
            if (!is_cancelled(due)) call(lane, due);
        } catch (...) {
            due.drop();
            go_on();
            throw;
        }
        due.drop();
    }
    go_on();
}

void Timeline::call(Lane& lane, const Due& due) {
    Handle* handle = due.handle();
    py::object callback, args, context;
    if (handle != nullptr) {
        callback = std::move(handle->callback);
        args = std::move(handle->args);
        context = std::move(handle->context);
    } else {
        callback = py::reinterpret_borrow<py::object>(due.event()->callback());
    }
    ++events;
    if (Ref<Stopwatch>::is(on_event)) {
        unboxed<Stopwatch>(on_event.ptr()).begin(callback.ptr());
    } else if (!on_event.is_none()) {
        const py::object watcher = on_event;
        columns::call(watcher, py::float_(now_s), lane.name, callback);
    }
    bool is_good;
    if (handle == nullptr) {
        is_good = within(due.event()->context(), [&] {
            due.event()->run();
            return true;
        });
    } else {
        is_good = within(context.ptr(), [&] {
            PyObject* result = PyObject_Call(callback.ptr(), args.ptr(), nullptr);
            Py_XDECREF(result);
            return result != nullptr;
        });
    }
    if (!is_good) report(callback, handle == nullptr ? Py_None : due.object());
}

// The exception that is set goes to the loop's handler.
void Timeline::report(py::handle callback, py::handle handle) {
    if (PyErr_ExceptionMatches(PyExc_SystemExit) ||
        PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
        throw py::error_already_set();
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != nullptr) PyException_SetTraceback(value, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    py::handle(self).attr("_report")(callback, py::reinterpret_steal<py::object>(value), handle);
}

int Timeline::visit(visitproc visit, void* arg) {
    Py_VISIT(on_event.ptr());
    Py_VISIT(variable.ptr());
    Py_VISIT(draw.ptr());
    for (const Ref<Lane>& each : lanes) Py_VISIT(each.ptr());
    for (const Timer& timer : timers) {
        const int stop = timer.due.visit(visit, arg);
        if (stop != 0) return stop;
    }
    return 0;
}

void Timeline::clear() {
    std::vector<Timer> gone;
    gone.swap(timers);
    for (const Timer& timer : gone) timer.due.drop();
    for (const Ref<Lane>& each : lanes) each->kill();
    const py::object watcher = std::move(on_event);
    on_event = py::none();
}

}  // namespace columns
