#include "handover.h"

#include <unistd.h>

#include <utility>

#include "clock.h"
#include "function.h"

namespace columns {
void Handover::submit(py::object work, py::object done, py::object spent) {
    {
        const std::lock_guard<std::mutex> guard(mutex_);
        works_.push_back({std::move(work), std::move(done), std::move(spent), era_});
    }
    changed_.notify_one();
}

void Handover::signal_to(int fd, int read_fd) {
    read_fd_ = read_fd;
    {
        const std::lock_guard<std::mutex> guard(telling_);
        fd_ = fd;
    }
    ++era_;
    const std::deque<Outcome> of_nobody = std::exchange(outcomes_, {});
}

void Handover::end() {
    {
        const std::lock_guard<std::mutex> guard(mutex_);
        ending_ = true;
    }
    changed_.notify_one();
}

void Handover::tell_loop() {
    const uint64_t one = 1;  // what an eventfd takes; a pipe that is full has told already
    const std::lock_guard<std::mutex> guard(telling_);
    if (fd_ >= 0 && write(fd_, &one, sizeof one) < 0) return;
}

bool Handover::await_work() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return ending_ || !works_.empty(); });
    return !works_.empty();
}

// At the end of the interpreter a thread that wants the GIL back is ended right there, by way of
// all frames above: so none of them, here, has anything to destroy then, or is `noexcept`.
PyObject* Handover::take() {
    const bool tells = std::exchange(is_untold_, false);
    PyThreadState* const state = PyEval_SaveThread();
    if (tells) tell_loop();
    const bool is_there = await_work();
    PyEval_RestoreThread(state);
    if (!is_there) Py_RETURN_NONE;
    Work work;
    {
        const std::lock_guard<std::mutex> guard(mutex_);
        work = std::move(works_.front());
        works_.pop_front();
    }
    work.spent = py::none();  // first, so that the work may have that memory
    running_ = {std::move(work.done), py::none(), py::none(), work.era, 0};
    began_s_ = monotonic_s();
    return work.work.release().ptr();
}

void Handover::tell(py::object result, py::object error) {
    running_.compute_s = monotonic_s() - began_s_;
    busy_s_ += running_.compute_s;
    began_s_ = 0;
    running_.result = std::move(result);
    running_.error = std::move(error);
    Outcome outcome = std::exchange(running_, {});
    if (outcome.era != era_) return;  // nobody's
    outcomes_.push_back(std::move(outcome));
    is_untold_ = true;
}

double Handover::busy_s() const { return busy_s_ + (began_s_ > 0 ? monotonic_s() - began_s_ : 0); }

void Handover::deliver() {
    char told[512];
    if (read_fd_ >= 0 && read(read_fd_, told, sizeof told) < 0) told[0] = 0;
    for (size_t left = outcomes_.size(); left > 0 && !outcomes_.empty(); --left) {
        const Outcome outcome = std::move(outcomes_.front());
        outcomes_.pop_front();
        try {
            call(outcome.done, outcome.result, outcome.error, py::float_(outcome.compute_s));
        } catch (...) {  // the others' turn comes
            if (!outcomes_.empty()) tell_loop();
            throw;
        }
    }
}

int Handover::visit(visitproc visit, void* arg) {
    for (const Work& each : works_) {
        Py_VISIT(each.work.ptr());
        Py_VISIT(each.done.ptr());
        Py_VISIT(each.spent.ptr());
    }
    for (const Outcome& each : outcomes_) {
        Py_VISIT(each.done.ptr());
        Py_VISIT(each.result.ptr());
        Py_VISIT(each.error.ptr());
    }
    return 0;
}

void Handover::clear() {
    std::deque<Work> works;
    {
        const std::lock_guard<std::mutex> guard(mutex_);
        std::swap(works, works_);
    }
    const std::deque<Outcome> outcomes = std::exchange(outcomes_, {});
}

py::object Submitting::operator()(PyObject* const* arguments) const {
    handover->submit(py::reinterpret_borrow<py::object>(arguments[0]),
                     py::reinterpret_borrow<py::object>(arguments[1]), py::none());
    return py::none();
}

namespace {

template <void (Handover::*Method)()>
PyObject* call_it(PyObject* self, PyObject*) {
    return guarded([&]() -> PyObject* {
        (unboxed<Handover>(self).*Method)();
        Py_RETURN_NONE;
    });
}

PyObject* take(PyObject* self, PyObject*) { return unboxed<Handover>(self).take(); }

PyObject* tell(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    return guarded([&]() -> PyObject* {
        if (count != 2) throw py::type_error("tell takes a result and an error");
        unboxed<Handover>(self).tell(py::reinterpret_borrow<py::object>(arguments[0]),
                                     py::reinterpret_borrow<py::object>(arguments[1]));
        Py_RETURN_NONE;
    });
}

PyObject* signal_to(PyObject* self, PyObject* arguments) {
    int fd, read_fd;
    if (PyArg_ParseTuple(arguments, "ii", &fd, &read_fd) == 0) return nullptr;
    return guarded([&]() -> PyObject* {
        unboxed<Handover>(self).signal_to(fd, read_fd);
        Py_RETURN_NONE;
    });
}

PyObject* submitter(PyObject* self, PyObject*) {
    return guarded([&]() -> PyObject* {
        return function<2>(Submitting{Ref<Handover>::borrowed(self)}).release().ptr();
    });
}

PyObject* get_busy_s(PyObject* self, void*) {
    return PyFloat_FromDouble(unboxed<Handover>(self).busy_s());
}

PyGetSetDef fields[] = {{"busy_s", get_busy_s, nullptr, nullptr, nullptr}, {}};

PyMethodDef methods[] = {
    {"take", take, METH_NOARGS, nullptr},
    {"tell", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(tell)), METH_FASTCALL, nullptr},
    {"deliver", call_it<&Handover::deliver>, METH_NOARGS, nullptr},
    {"end", call_it<&Handover::end>, METH_NOARGS, nullptr},
    {"signal_to", signal_to, METH_VARARGS, nullptr},
    {"submitter", submitter, METH_NOARGS, nullptr},
    {},
};

}  // namespace

void bind_handover(py::module_& m) {
    add_box<Handover>(m, "asyncmoe.native._columns.Handover",
                      {{Py_tp_methods, methods}, {Py_tp_getset, fields}}, 0, true);
}

}  // namespace columns
