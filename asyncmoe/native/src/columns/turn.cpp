// Whatever is not as usual is handed to the executor before anything is touched.
#include "turn.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "members.h"

namespace columns {
namespace {

struct Attributes {
    PyObject* const fill = PyUnicode_InternFromString("_fill");
    PyObject* const done = PyUnicode_InternFromString("_done");
    PyObject* const fail = PyUnicode_InternFromString("_break");
    PyObject* const travel = PyUnicode_InternFromString("_travel");
    PyObject* const timer_s = PyUnicode_InternFromString("_timer_s");
    PyObject* const prepare = PyUnicode_InternFromString("prepare");
    PyObject* const finish = PyUnicode_InternFromString("finish");
    PyObject* const row_count = PyUnicode_InternFromString("row_count");
    PyObject* const stage = PyUnicode_InternFromString("stage");
    const py::object passed = py::module_::import("asyncmoe.passage").attr("Passed");
};

const Attributes& attributes() {
    static const Attributes* const found = new Attributes;
    return *found;
}

// The members of `KindTimes` in asyncmoe/stats.py.
struct TimesMembers {
    Member batches, rows, compute_s, prepare_s, finish_s;
};

const TimesMembers& of_times() {
    static const TimesMembers* const found = [] {
        const py::object type = py::module_::import("asyncmoe.stats").attr("KindTimes");
        return new TimesMembers{Member(type, "batches"), Member(type, "rows"),
                                Member(type, "compute_s"), Member(type, "prepare_s"),
                                Member(type, "finish_s")};
    }();
    return *found;
}

double real(PyObject* number) {
    const double value = PyFloat_AsDouble(number);
    if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
    return value;
}

double seconds(const py::object& clock) { return real(call(clock).ptr()); }

int64_t whole(PyObject* number) {
    const int64_t value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    return value;
}

void add(const Member& member, const py::object& to, double more) {
    member.set(to.ptr(), py::float_(real(member.of(to.ptr())) + more));
}

void add(const Member& member, const py::object& to, int64_t more) {
    member.set(to.ptr(), py::int_(whole(member.of(to.ptr())) + more));
}

}  // namespace

void Turn::init(py::handle self, py::object executor, py::object policy, py::object stages) {
    executor_ = executor;
    ender_ = self.attr("done");
    stages_ = std::move(stages);
    running_ = executor.attr("_running");
    after_ = executor.attr("_after");
    append_ = running_.attr("append");
    popleft_ = running_.attr("popleft");
    executed_ = executor.attr("_scheduler").attr("executed");
    submit_ = executor.attr("_device").attr("submit");
    clock_ = executor.attr("_times").attr("clock");
    now_s_ = executor.attr("_loop").attr("time");
    depth_ = executor.attr("_depth").cast<int64_t>();
    queues_ = executor.attr("_queues").cast<std::shared_ptr<Queues>>();
    const auto max_rows = column<int64_t>(policy.attr("max_rows"), "max_rows");
    const auto min_rows = column<int64_t>(policy.attr("min_rows"), "min_rows");
    const auto linger_s = column<double>(policy.attr("linger_s"), "linger_s");
    const py::object kinds = py::module_::import("asyncmoe.stage").attr("Kind");
    const py::object attention = kinds.attr("ATTENTION");
    const bool is_virtual = executor.attr("_device").attr("virtual").cast<bool>();
    const py::object times = executor.attr("_times").attr("kinds");
    for (const py::handle kind : queues_->chain.attr("kinds")) {
        const int64_t stage = of_stage_.size();
        of_stage_.push_back({times[kind], !is_virtual && kind.is(attention),
                             max_rows.at(stage, "max_rows"), min_rows.at(stage, "min_rows"),
                             linger_s.at(stage, "linger_s")});
    }
}

void Turn::close() {
    closed_ = true;
    stages_ = py::none();
}

int Turn::visit(visitproc visit, void* arg) {
    for (const py::object* each : {&executor_, &stages_, &running_, &after_, &append_, &popleft_,
                                   &executed_, &submit_, &ender_, &clock_, &now_s_}) {
        Py_VISIT(each->ptr());
    }
    for (const Stage& each : of_stage_) Py_VISIT(each.times.ptr());
    return 0;
}

void Turn::clear() {
    close();
    for (py::object* each : {&executor_, &stages_, &ender_}) {
        const py::object gone = std::exchange(*each, py::none());
    }
}

// An error of ours, or of a rule or a stage, ends the executor.
template <typename F>
void Turn::attempt(F work) {
    try {
        work();
        return;
    } catch (py::error_already_set& error) {
        error.restore();
    } catch (const py::builtin_exception& error) {
        error.set_error();
    }
    py::error_already_set raised;
    if (!raised.matches(PyExc_Exception)) throw raised;
    const py::object value = raised.value();
    call_method(executor_, attributes().fail, value);
}

void Turn::hear() {
    if (is_closed()) return;
    bell->rung = false;
    attempt([this] { fill(); });
}

// See `Executor._fill`.
void Turn::fill() {
    while (!is_closed() && PyObject_Size(running_.ptr()) < depth_) {
        if (queues_->total == 0) return;
        const double begin_s = seconds(clock_);
        const Choice choice = choose();
        if (choice.what == Choice::kWait) return;
        if (choice.what == Choice::kAsk) {
            call_method(executor_, attributes().fill);
            return;
        }
        const py::object step = prepare(choice.stage);
        ++queues_->decision;
        call(executed_, py::int_(choice.stage), get(step, attributes().row_count));
        call(append_, step);
        call(submit_, step, ender_);
        add(of_times().prepare_s, of_stage_[choice.stage].times, seconds(clock_) - begin_s);
    }
}

// See `Executor._choose`: settles only what leaves no choice.
Turn::Choice Turn::choose() const {
    const Queues& queues = *queues_;
    int64_t runnable = 0, first = -1;
    bool lingers = false;
    double time_s = 0, next_s = std::numeric_limits<double>::infinity();
    for (size_t stage = 0; stage < of_stage_.size(); ++stage) {
        const Stage& of = of_stage_[stage];
        const int64_t rows = queues.rows[stage];
        bool may_run = rows >= of.min_rows;
        if (!may_run && rows > 0) {
            if (!lingers) time_s = seconds(now_s_);
            lingers = true;
            const double lingered_s = queues.oldest_s[stage] + of.linger_s;
            may_run = lingered_s <= time_s;
            next_s = std::min(next_s, lingered_s);
        }
        if (may_run && runnable++ == 0) first = stage;
    }
    if (runnable == 0) {
        const bool is_timed =
            !lingers || next_s >= real(get(executor_, attributes().timer_s).ptr());
        return {is_timed ? Choice::kWait : Choice::kAsk};
    }
    const int64_t rows = queues.rows[first], most = of_stage_[first].max_rows;
    if (runnable == 1 && rows < most && computes()) return {Choice::kWait};
    if (rows == queues.total && rows <= most) return {Choice::kRun, first};
    return {Choice::kAsk};
}

py::object Turn::prepare(int64_t stage) {
    const py::int_ number(stage), most(of_stage_[stage].max_rows);
    py::object step = call_method(stages_, attributes().prepare, number, most);
    if (of_stage_[stage].travels && queues_->total == 0 && !computes()) {
        step = call_method(executor_, attributes().travel, number, step);
    }
    return step;
}

// See `Executor._done`.
void Turn::done(PyObject* result, PyObject* error, PyObject* compute_s) {
    if (is_closed()) return;
    if (error != Py_None || PyObject_Size(after_.ptr()) != 0 ||
        Py_TYPE(result) == reinterpret_cast<PyTypeObject*>(attributes().passed.ptr())) {
        call_method(executor_, attributes().done, py::handle(result), py::handle(error),
                    py::handle(compute_s));
        return;
    }
    const py::object step = call(popleft_);  // a device works in order
    attempt([&] {
        finish(step, result, compute_s);
        if (computes()) {
            bell->ring();
        } else {  // before anything else that waits for the loop: the device is idle
            fill();
        }
    });
}

void Turn::finish(const py::object& step, PyObject* result, PyObject* compute_s) {
    const double begin_s = seconds(clock_);
    const int64_t stage = whole(get(step, attributes().stage).ptr());
    if (stage < 0 || stage >= static_cast<int64_t>(of_stage_.size())) {
        throw py::index_error("no such stage");
    }
    const py::object& times = of_stage_[stage].times;
    add(of_times().batches, times, int64_t{1});
    add(of_times().rows, times, whole(get(step, attributes().row_count).ptr()));
    add(of_times().compute_s, times, real(compute_s));
    call_method(stages_, attributes().finish, step, py::handle(result));
    add(of_times().finish_s, times, seconds(clock_) - begin_s);
}

namespace {

Turn& turn_of(PyObject* self) { return unboxed<Turn>(self); }

int init(PyObject* self, PyObject* arguments, PyObject*) {
    return guarded([&] {
        PyObject *executor, *policy, *stages;
        if (!PyArg_ParseTuple(arguments, "OOO", &executor, &policy, &stages)) {
            throw py::error_already_set();
        }
        const auto given = [](PyObject* object) {
            return py::reinterpret_borrow<py::object>(object);
        };
        turn_of(self).init(given(self), given(executor), given(policy), given(stages));
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
    {"close", close, METH_NOARGS, nullptr},
    {},
};

}  // namespace

void bind_turn(py::module_& m) {
    add_box<Turn>(m, "asyncmoe.native._columns.Turn",
                  {{Py_tp_methods, methods}, {Py_tp_init, reinterpret_cast<void*>(init)}}, 0, true);
}

}  // namespace columns
