#include "model_link.h"

#include "members.h"

namespace columns {
namespace {

struct Methods {
    PyObject* const on_parcel = PyUnicode_InternFromString("on_parcel");
    PyObject* const on_message = PyUnicode_InternFromString("on_message");
};

const Methods& methods() {
    static const Methods found;
    return found;
}

int64_t number(PyObject* object) {
    const long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    return value;
}

// `object.name(arguments...)`.
template <typename... Arguments>
void invoke(PyObject* name, const py::object& object, Arguments... arguments) {
    PyObject* of[] = {nullptr, object.ptr(), arguments.ptr()...};
    PyObject* result = PyObject_VectorcallMethod(
        name, of + 1, (1 + sizeof...(Arguments)) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
    if (result == nullptr) throw py::error_already_set();
    Py_DECREF(result);
}

// The next one of a class comes out of a link.
class Taking : public Event {
  public:
    Taking(Ref<Link> link, int kind) : link_(std::move(link)), kind_(kind) {}

    void run() override { link_->take(kind_); }
    PyObject* context() const override { return link_->taker->context.ptr(); }
    Lane& lane() const override { return *link_->taker->place; }
    PyObject* callback() const override { return link_->taker->take.ptr(); }
    int visit(visitproc visit, void* arg) const override {
        Py_VISIT(link_.ptr());
        return 0;
    }

  private:
    const Ref<Link> link_;
    const int kind_;
};

// The first byte is at the NIC of the other host. This belongs to no rank, whose host it would wait
// for.
class Entering : public Event {
  public:
    Entering(Ref<Link> link, int kind, const Way::Crossing& crossing, double nbytes)
        : link_(std::move(link)), kind_(kind), crossing_(crossing), nbytes_(nbytes) {}

    void run() override {
        link_->come_out(kind_, link_->way->enter(crossing_.first_s, crossing_.last_s, nbytes_));
    }
    PyObject* context() const override { return link_->sender->outside.ptr(); }
    Lane& lane() const override { return *link_->sender->timeline->lanes.front(); }
    PyObject* callback() const override { return link_->sender->enter.ptr(); }
    int visit(visitproc visit, void* arg) const override {
        Py_VISIT(link_.ptr());
        return 0;
    }

  private:
    const Ref<Link> link_;
    const int kind_;
    const Way::Crossing crossing_;
    const double nbytes_;
};

}  // namespace

// See the twin: what it does not do itself, the transport does.
py::object Port::post(py::handle peer, PyObject* parcel) {
    const int64_t to = number(peer.ptr());
    if (this->link(to) == nullptr) owner.attr("open")(peer);
    Link* link = this->link(to);
    const bool is_packed =
        Py_TYPE(parcel) == reinterpret_cast<PyTypeObject*>(names().packed_parcel.ptr());
    if (link != nullptr && link->error.is_none() && is_packed && link->plain) {
        const auto& of = members().parcel;
        const int64_t count = number(of.count.of(parcel)), kind = number(of.kind.of(parcel));
        if (count <= most_rows && (kind == kDispatch || kind == kCombine)) {
            const Py_ssize_t size = PyObject_Size(of.block.of(parcel));
            if (size < 0) throw py::error_already_set();
            const auto nbytes = static_cast<double>(kPreludeBytes + size + count * row_bytes[kind]);
            return link->put(static_cast<int>(kind), py::reinterpret_borrow<py::object>(parcel),
                             py::none(), nbytes);
        }
    }
    return owner.attr("post_framed")(peer, py::handle(parcel));
}

int Port::visit(visitproc visit, void* arg) {
    for (const py::object* each : {&owner, &receiver, &loop, &lane_object, &context, &outside}) {
        Py_VISIT(each->ptr());
    }
    for (const Ref<Link>& each : links) Py_VISIT(each.ptr());
    return 0;
}

void Port::clear() {
    const std::vector<Ref<Link>> gone = std::move(links);
    links.clear();
    const py::object one = std::move(owner), two = std::move(receiver);
    owner = receiver = py::none();
}

py::object Link::put(int kind, py::object what, py::object payload, double nbytes) {
    Ref<Consignment> posted;
    if (kind != kControl) {
        posted = Ref<Consignment>::make();
        posted->self = posted.ptr();
        posted->taker = taker;
        unsent.add(posted);
    }
    const double now_s = sender->timeline->now_s;
    const double begin_s =
        sender->charge(kind == kControl ? sender->message_s : sender->parcel_out_s);
    on_it[kind].push({what.release().ptr(), payload.release().ptr(),
                      posted ? posted.object().inc_ref().ptr() : nullptr});
    const Way::Crossing crossing = way->put(now_s, begin_s, nbytes);
    if (crossing.is_due) {
        come_out(kind, crossing.due_s);
    } else {
        sender->timeline->at(crossing.first_s, Due::of(new Entering(Ref<Link>::borrowed(self), kind,
                                                                    crossing, nbytes)));
    }
    return posted ? posted.object() : py::none();
}

// All of it will be there at `due_s`, and not before what went before it.
void Link::come_out(int kind, double due_s) {
    last_s[kind] = std::max(due_s, last_s[kind]);
    taker->timeline->at(last_s[kind], Due::of(new Taking(Ref<Link>::borrowed(self), kind)));
}

void Link::take(int kind) {
    if (on_it[kind].empty()) return;  // the link was emptied when it was lost
    const Item item = on_it[kind].pop();
    const auto what = py::reinterpret_steal<py::object>(item.what);
    const auto payload = py::reinterpret_steal<py::object>(item.payload);
    const auto posted = py::reinterpret_steal<py::object>(item.posted);
    if (!back || !back->error.is_none()) return;  // the sender is told by `_lose`
    Port& port = *taker;
    try {
        if (kind == kControl) {
            port.charge(port.message_s);
            invoke(methods().on_message, port.receiver, sender->rank, what);
        } else {
            port.charge(port.parcel_in_s);
            if (port.lane != nullptr) port.lane->counts(port.parcel_in_s);
            take_parcel(what, payload, unboxed<Consignment>(posted.ptr()));
        }
    } catch (py::error_already_set& error) {
        if (!error.matches(names().protocol_error)) throw;
        const py::object value = error.value();
        port.owner.attr("refused")(sender->rank, value);
    }
}

void Link::take_parcel(const py::object& what, const py::object& payload, Consignment& posted) {
    py::object parcel = what;
    if (!payload.is_none()) parcel = taker->owner.attr("decoded")(what, payload);
    posted.hold();
    const auto& of = members().arrival;
    const py::object arrival = blank(names().arrival);
    of.source.set(arrival.ptr(), sender->rank.ptr());
    of.parcel.set(arrival.ptr(), parcel.ptr());
    of.release.set(arrival.ptr(), posted.self);
    try {
        invoke(methods().on_parcel, taker->receiver, arrival);
    } catch (py::error_already_set& error) {
        const bool is_held = posted.state == Consignment::State::kHeld;
        if (is_held && error.matches(names().protocol_error)) posted.release();
        throw;
    }
}

void Link::empty() {
    for (Ring<Item>& items : on_it) {
        while (!items.empty()) {
            const Item item = items.pop();
            Py_DECREF(item.what);
            Py_DECREF(item.payload);
            Py_XDECREF(item.posted);
        }
    }
}

int Link::visit(visitproc visit, void* arg) {
    for (PyObject* each : {sender.ptr(), taker.ptr(), way.ptr(), back.ptr(), error.ptr()}) {
        Py_VISIT(each);
    }
    for (const Ring<Item>& items : on_it) {
        for (size_t i = 0; i < items.size(); ++i) {
            Py_VISIT(items[i].what);
            Py_VISIT(items[i].payload);
            Py_VISIT(items[i].posted);
        }
    }
    return unsent.visit(visit, arg);
}

// What methods need stays.
void Link::clear() {
    empty();
    back.reset();
}

}  // namespace columns
