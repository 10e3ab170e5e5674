// What Python sees of the model transport's links.
#include "model_link.h"

namespace columns {
namespace {

Link& link_of(PyObject* self) { return unboxed<Link>(self); }
Port& port_of(PyObject* self) { return unboxed<Port>(self); }

int port_init(PyObject* self, PyObject* arguments, PyObject* keywords) {
    return guarded([&] {
        static const char* names[] = {
            "owner",
            "receiver",
            "loop",
            "lane",
            "context",
            "rank",
            "most_rows",
            "dispatch_row_bytes",
            "row_bytes",
            "parcel_out_s",
            "parcel_in_s",
            "message_s",
            "take",
            "enter",
            nullptr,
        };
        PyObject *owner, *receiver, *loop, *lane, *context, *rank, *take, *enter;
        long long most_rows, dispatch, combine;
        Port& port = port_of(self);
        if (!PyArg_ParseTupleAndKeywords(
                arguments, keywords, "OOOOOOLLLdddOO", const_cast<char**>(names), &owner, &receiver,
                &loop, &lane, &context, &rank, &most_rows, &dispatch, &combine, &port.parcel_out_s,
                &port.parcel_in_s, &port.message_s, &take, &enter)) {
            throw py::error_already_set();
        }
        const auto of = [](PyObject* object) { return py::reinterpret_borrow<py::object>(object); };
        port.timeline = Ref<Timeline>::of(loop).get();
        port.loop = of(loop);
        port.timeline->check_set_up();
        Lane* main = port.timeline->lanes.front().get();
        if (lane != Py_None) port.lane = Ref<Lane>::of(lane).get();
        port.place = port.lane == nullptr ? main : port.lane;
        port.lane_object = of(lane);
        port.outside = main->context;
        port.owner = of(owner);
        port.receiver = of(receiver);
        port.context = of(context);
        port.rank = of(rank);
        port.take = of(take);
        port.enter = of(enter);
        port.most_rows = most_rows;
        port.row_bytes[kDispatch] = dispatch;
        port.row_bytes[kCombine] = combine;
        return 0;
    });
}

PyObject* port_post(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    return guarded([&]() -> PyObject* {
        if (count != 2) throw py::type_error("post() takes a peer and a parcel");
        return port_of(self).post(arguments[0], arguments[1]).release().ptr();
    });
}

PyObject* port_link(PyObject* self, PyObject* peer) {
    return guarded([&]() -> PyObject* {
        Link* link = port_of(self).link(py::handle(peer).cast<int64_t>());
        return (link == nullptr ? py::none() : py::reinterpret_borrow<py::object>(link->self))
            .release()
            .ptr();
    });
}

// One direction between two ports.
Ref<Link> made(PyObject* sender, PyObject* taker, PyObject* way, bool plain) {
    auto link = Ref<Link>::make();
    link->self = link.ptr();
    link->error = py::none();
    link->sender = Ref<Port>::borrowed(sender);
    link->taker = Ref<Port>::borrowed(taker);
    link->way = Ref<Way>::of(way);
    link->plain = plain;
    return link;
}

void keep(PyObject* sender, PyObject* taker, const Ref<Link>& link) {
    const auto peer = port_of(taker).rank.cast<size_t>();
    std::vector<Ref<Link>>& links = port_of(sender).links;
    if (peer >= links.size()) links.resize(peer + 1);
    links[peer] = link;
}

PyObject* port_join(PyObject* self, PyObject* arguments) {
    return guarded([&]() -> PyObject* {
        PyObject *other, *way, *way_back;
        int plain;
        if (!PyArg_ParseTuple(arguments, "OOOp", &other, &way, &way_back, &plain)) {
            throw py::error_already_set();
        }
        Ref<Port>::of(other);
        Ref<Link> there = made(self, other, way, plain), back = made(other, self, way_back, plain);
        there->back = back;
        back->back = there;
        keep(self, other, there);
        keep(other, self, back);
        return there.release();
    });
}

PyObject* get_lent(PyObject* self, void*) { return PyLong_FromLongLong(port_of(self).lent); }

PyObject* link_put(PyObject* self, PyObject* arguments) {
    return guarded([&]() -> PyObject* {
        int kind;
        PyObject *what, *payload;
        double nbytes;
        if (!PyArg_ParseTuple(arguments, "iOOd", &kind, &what, &payload, &nbytes)) {
            throw py::error_already_set();
        }
        if (kind < 0 || kind >= kClasses) throw py::value_error("no such class");
        return link_of(self)
            .put(kind, py::reinterpret_borrow<py::object>(what),
                 py::reinterpret_borrow<py::object>(payload), nbytes)
            .release()
            .ptr();
    });
}

PyObject* link_deliver(PyObject* self, PyObject*) {
    return guarded([&]() -> PyObject* {
        Link& link = link_of(self);
        for (int kind = 0; kind < kClasses; ++kind) {
            while (!link.on_it[kind].empty()) link.take(kind);
        }
        return py::none().release().ptr();
    });
}

PyObject* link_fail(PyObject* self, PyObject* error) {
    return guarded([&]() -> PyObject* {
        link_of(self).unsent.fail(py::reinterpret_borrow<py::object>(error));
        return py::none().release().ptr();
    });
}

PyObject* get_last_s(PyObject* self, void*) {
    const double* last_s = link_of(self).last_s;
    return PyFloat_FromDouble(std::max({last_s[0], last_s[1], last_s[2]}));
}

PyObject* get_way(PyObject* self, void*) { return link_of(self).way.object().inc_ref().ptr(); }

PyMethodDef port_methods[] = {
    {"post", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(port_post)), METH_FASTCALL,
     nullptr},
    {"link", port_link, METH_O, nullptr},
    {"join", port_join, METH_VARARGS, nullptr},
    {},
};

PyGetSetDef port_fields[] = {{"lent", get_lent, nullptr, nullptr, nullptr}, {}};

PyMethodDef link_methods[] = {
    {"put", link_put, METH_VARARGS, nullptr},
    {"deliver", link_deliver, METH_NOARGS, nullptr},
    {"fail", link_fail, METH_O, nullptr},
    {},
};

PyGetSetDef link_fields[] = {
    {"way", get_way, nullptr, nullptr, nullptr},
    {"last_s", get_last_s, nullptr, nullptr, nullptr},
    {"error", get_object<Link, &Link::error>, set_object<Link, &Link::error>, nullptr, nullptr},
    {},
};

}  // namespace

void bind_model_link(py::module_& m) {
    bind_model_way(m);
    bind_consignment(m);
    add_box<Port>(m, "asyncmoe.native._columns.Port",
                  {{Py_tp_methods, port_methods},
                   {Py_tp_getset, port_fields},
                   {Py_tp_init, reinterpret_cast<void*>(port_init)}},
                  0, true);
    add_box<Link>(m, "asyncmoe.native._columns.Link",
                  {{Py_tp_methods, link_methods}, {Py_tp_getset, link_fields}});
}

}  // namespace columns
