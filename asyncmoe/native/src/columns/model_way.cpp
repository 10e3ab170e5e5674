#include "model_way.h"

#include <algorithm>

namespace columns {
namespace {

// What comes that soon beyond the latency gets its turn at a NIC at once; as in the twin.
constexpr double kNearS = 200e-6;

bool is_there(const py::object& object) { return object && !object.is_none(); }

double number(const py::object& value) {
    const double found = PyFloat_AsDouble(value.ptr());
    if (found == -1 && PyErr_Occurred()) throw py::error_already_set();
    return found;
}

// When work that begins then is done, with cross traffic.
double end_of(const py::object& traffic, double begin_s, double work_s) {
    return number(traffic.attr("end_of")(begin_s, work_s));
}

int nics_init(PyObject* self, PyObject* arguments, PyObject*) {
    return guarded([&] {
        Py_ssize_t hosts, world;
        if (!PyArg_ParseTuple(arguments, "nn", &hosts, &world)) throw py::error_already_set();
        if (hosts < 0 || world < 0) throw py::value_error("less than no hosts or ranks");
        Nics& nics = unboxed<Nics>(self);
        if (!nics.in_s.empty()) throw std::runtime_error("ways refer to it already");
        nics.out_s.assign(hosts, 0.0);
        nics.in_s.assign(hosts, 0.0);
        nics.idle_s.assign(hosts, {0.0, 0.0});
        nics.local_s.assign(world, 0.0);
        return 0;
    });
}

PyObject* nics_way(PyObject* self, PyObject* arguments) {
    return guarded([&]() -> PyObject* {
        int local;
        Py_ssize_t place;
        PyObject* into;
        auto way = Ref<Way>::make();
        if (!PyArg_ParseTuple(arguments, "pnOdd", &local, &place, &into, &way->byte_s,
                              &way->latency_s)) {
            throw py::error_already_set();
        }
        Nics& nics = unboxed<Nics>(self);
        std::vector<double>& exits = local ? nics.local_s : nics.out_s;
        if (into != Py_None) {
            way->into = py::handle(into).cast<int64_t>();
            if (way->into < 0) throw py::index_error("a NIC below 0");
            nics.in_s.at(way->into);
        }
        if (place < 0) throw py::index_error("a place below 0");
        way->exit_s = &exits.at(place);
        way->near_s = way->latency_s + kNearS;
        way->nics = Ref<Nics>::borrowed(self);
        return way.release();
    });
}

PyObject* way_put(PyObject* self, PyObject* arguments) {
    return guarded([&]() -> PyObject* {
        double now_s, begin_s, nbytes;
        if (!PyArg_ParseTuple(arguments, "ddd", &now_s, &begin_s, &nbytes)) {
            throw py::error_already_set();
        }
        const Way::Crossing crossing = unboxed<Way>(self).put(now_s, begin_s, nbytes);
        py::object due = py::none();
        if (crossing.is_due) due = py::float_(crossing.due_s);
        return py::make_tuple(crossing.first_s, crossing.last_s, due).release().ptr();
    });
}

PyObject* way_enter(PyObject* self, PyObject* arguments) {
    return guarded([&]() -> PyObject* {
        double first_s, last_s, nbytes;
        if (!PyArg_ParseTuple(arguments, "ddd", &first_s, &last_s, &nbytes)) {
            throw py::error_already_set();
        }
        if (unboxed<Way>(self).into < 0) throw py::value_error("there is no NIC to wait for");
        return PyFloat_FromDouble(unboxed<Way>(self).enter(first_s, last_s, nbytes));
    });
}

PyObject* get_sent_bytes(PyObject* self, void*) {
    return PyLong_FromDouble(unboxed<Way>(self).sent_bytes);
}

PyMethodDef nics_methods[] = {{"way", nics_way, METH_VARARGS, nullptr}, {}};

PyMethodDef way_methods[] = {
    {"put", way_put, METH_VARARGS, nullptr},
    {"enter", way_enter, METH_VARARGS, nullptr},
    {},
};

PyGetSetDef way_fields[] = {
    {"sent_bytes", get_sent_bytes, nullptr, nullptr, nullptr},
    {"latency_s", get_number<Way, &Way::latency_s>, nullptr, nullptr, nullptr},
    {"jitter_s", get_number<Way, &Way::jitter_s>, set_number<Way, &Way::jitter_s>, nullptr,
     nullptr},
    {"random", get_object<Way, &Way::random>, set_object<Way, &Way::random>, nullptr, nullptr},
    {"at_source", get_object<Way, &Way::at_source>, set_object<Way, &Way::at_source>, nullptr,
     nullptr},
    {"at_target", get_object<Way, &Way::at_target>, set_object<Way, &Way::at_target>, nullptr,
     nullptr},
    {},
};

}  // namespace

Way::Crossing Way::put(double now_s, double begin_s, double nbytes) {
    sent_bytes += nbytes;
    double end_s = begin_s;
    if (byte_s != 0) {
        begin_s = std::max(begin_s, *exit_s);
        const double work_s = nbytes * byte_s;
        end_s = is_there(at_source) ? end_of(at_source, begin_s, work_s) : begin_s + work_s;
        *exit_s = end_s;
    }
    const double first_s = begin_s + latency_s;
    double last_s = end_s + latency_s;
    if (is_there(random)) last_s += jitter_s * number(call(random));
    if (into < 0) return {first_s, last_s, last_s, true};
    if (first_s - now_s > near_s) return {first_s, last_s, 0.0, false};
    return {first_s, last_s, enter(first_s, last_s, nbytes), true};
}

double Way::enter(double first_s, double last_s, double nbytes) {
    double& free_s = nics->in_s[into];
    auto& [idle_s, until_s] = nics->idle_s[into];
    const double work_s = nbytes * byte_s;
    double begin_s = first_s;
    if (begin_s < free_s) {
        const double end_s = std::max(begin_s, idle_s) + work_s;
        if (end_s <= until_s && !is_there(at_target)) {
            idle_s = end_s;
            return std::max(end_s, last_s);
        }
        begin_s = free_s;
    } else {
        idle_s = free_s;
        until_s = begin_s;
    }
    const double end_s =
        is_there(at_target) ? end_of(at_target, begin_s, work_s) : begin_s + work_s;
    free_s = end_s;
    return std::max(end_s, last_s);
}

int Way::visit(visitproc visit, void* arg) {
    Py_VISIT(nics.ptr());
    Py_VISIT(random.ptr());
    Py_VISIT(at_source.ptr());
    Py_VISIT(at_target.ptr());
    return 0;
}

void bind_model_way(py::module_& m) {
    add_box<Nics>(m, "asyncmoe.native._columns.Nics",
                  {{Py_tp_methods, nics_methods}, {Py_tp_init, reinterpret_cast<void*>(nics_init)}},
                  0, true);
    add_box<Way>(m, "asyncmoe.native._columns.Way",
                 {{Py_tp_methods, way_methods}, {Py_tp_getset, way_fields}});
}

}  // namespace columns
