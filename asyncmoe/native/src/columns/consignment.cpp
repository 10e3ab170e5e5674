#include "consignment.h"

#include "model_link.h"

namespace columns {
namespace {

Consignment& consignment_of(PyObject* self) { return unboxed<Consignment>(self); }

PyObject* release(PyObject* self, PyObject* arguments, PyObject* keywords) {
    return guarded([&]() -> PyObject* {
        if (PyTuple_GET_SIZE(arguments) != 0 || keywords != nullptr) {
            throw py::type_error("a release takes no arguments");
        }
        consignment_of(self).release();
        return py::none().release().ptr();
    });
}

PyObject* when_free(PyObject* self, PyObject* callback) {
    return guarded([&]() -> PyObject* {
        Consignment& consignment = consignment_of(self);
        if (consignment.source_free) call(callback, py::handle(self));
        else consignment.callback = py::reinterpret_borrow<py::object>(callback);
        return py::none().release().ptr();
    });
}

PyObject* complete(PyObject* self, PyObject* arguments) {
    return guarded([&]() -> PyObject* {
        PyObject* error = Py_None;
        if (!PyArg_ParseTuple(arguments, "|O", &error)) throw py::error_already_set();
        consignment_of(self).complete(py::reinterpret_borrow<py::object>(error));
        return py::none().release().ptr();
    });
}

PyMethodDef methods[] = {
    {"when_free", when_free, METH_O, "See `Posted`."},
    {"complete", complete, METH_VARARGS, "See `Posted`."},
    {},
};

PyGetSetDef fields[] = {
    {"source_free", get_flag<Consignment, &Consignment::source_free>, nullptr, nullptr, nullptr},
    {"error", get_object<Consignment, &Consignment::error>, nullptr, nullptr, nullptr},
    {},
};

}  // namespace

void Consignment::hold() {
    state = State::kHeld;
    ++taker->lent;
}

void Consignment::release() {
    if (state != State::kHeld) {
        const char* name = state == State::kFree ? "FREE" : "FILLING";
        throw std::runtime_error(std::string("the loan is ") + name +
                                 ", not HELD: it cannot become FREE");
    }
    const auto me = py::reinterpret_borrow<py::object>(self);  // the list may have the last one
    state = State::kFree;
    --taker->lent;
    taker.reset();
    Unsent::remove(*this);
    complete(py::none());
}

void Consignment::complete(const py::object& with_error) {
    if (source_free) return;
    source_free = true;
    error = with_error;
    const py::object called = std::move(callback);
    if (called) call(called, py::handle(self));
}

int Consignment::visit(visitproc visit, void* arg) {
    Py_VISIT(taker.ptr());
    Py_VISIT(error.ptr());
    Py_VISIT(callback.ptr());
    return 0;
}

void Consignment::clear() {
    const py::object one = std::move(error), two = std::move(callback);
}

Unsent::~Unsent() {
    while (ends_.behind != nullptr && ends_.behind != &ends_) {
        remove(*ends_.behind);
    }
}

void Unsent::add(const Ref<Consignment>& consignment) {
    if (ends_.behind == nullptr) ends_.before = ends_.behind = &ends_;
    consignment.object().inc_ref();
    Consignment& last = *consignment;
    last.before = ends_.before;
    last.behind = &ends_;
    ends_.before->behind = &last;
    ends_.before = &last;
}

void Unsent::remove(Consignment& consignment) {
    if (consignment.behind == nullptr) return;
    consignment.before->behind = consignment.behind;
    consignment.behind->before = consignment.before;
    consignment.before = consignment.behind = nullptr;
    Py_DECREF(consignment.self);
}

int Unsent::visit(visitproc visit, void* arg) const {
    for (Consignment* each = ends_.behind; each != nullptr && each != &ends_; each = each->behind) {
        Py_VISIT(each->self);
    }
    return 0;
}

void Unsent::fail(const py::object& error) {
    std::vector<py::object> gone;
    while (ends_.behind != nullptr && ends_.behind != &ends_) {
        gone.push_back(py::reinterpret_borrow<py::object>(ends_.behind->self));
        remove(*ends_.behind);
    }
    for (const py::object& each : gone) consignment_of(each.ptr()).complete(error);
}

void bind_consignment(py::module_& m) {
    add_box<Consignment>(m, "asyncmoe.native._columns.Consignment",
                         {{Py_tp_methods, methods},
                          {Py_tp_getset, fields},
                          {Py_tp_call, reinterpret_cast<void*>(release)}});
}

}  // namespace columns
