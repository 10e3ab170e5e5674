// The links of the model transport on virtual time: the compiled twin of transports/model_link.py.
#pragma once

#include "consignment.h"
#include "model_way.h"
#include "timeline.h"

namespace columns {

struct Link;

// One rank's end of all its links.
struct Port {
    py::object owner, receiver;  // see the twin
    py::object loop, lane_object, context, outside;
    Timeline* timeline = nullptr;  // which `loop` is
    Lane* lane = nullptr;          // whose host works for it; null: none does
    Lane* place = nullptr;         // where its arrivals are taken in
    py::object rank, take, enter;
    double parcel_out_s = 0, parcel_in_s = 0, message_s = 0;
    int64_t most_rows = 0, row_bytes[kClasses] = {};
    long long lent = 0;
    std::vector<Ref<Link>> links;  // by peer; null: not made yet

    double charge(double seconds) const {
        return lane == nullptr ? timeline->now_s : lane->charge(seconds);
    }
    Link* link(int64_t peer) const {
        const bool is_known = peer >= 0 && static_cast<size_t>(peer) < links.size();
        return is_known ? links[peer].get() : nullptr;
    }
    py::object post(py::handle peer, PyObject* parcel);

    int visit(visitproc visit, void* arg);
    void clear();
};

// What one rank sends to another.
struct Link {
    // Something on its way. A message has nothing posted; neither it nor a packed parcel has a
    // payload.
    struct Item {
        PyObject *what, *payload, *posted;  // owned
    };

    Ref<Port> sender, taker;
    Ref<Way> way;
    Ref<Link> back;    // the other direction
    py::object error;  // None: the sender can send
    bool plain = false;
    double last_s[kClasses] = {};  // when the last one of each class comes out
    Ring<Item> on_it[kClasses];
    Unsent unsent;
    PyObject* self = nullptr;

    ~Link() { empty(); }
    // Puts something on the link. Returns what was posted, None for a message.
    py::object put(int kind, py::object what, py::object payload, double nbytes);
    void come_out(int kind, double due_s);
    // The next one of a class has come out.
    void take(int kind);
    void empty();

    int visit(visitproc visit, void* arg);
    void clear();

  private:
    void take_parcel(const py::object& what, const py::object& payload, Consignment& posted);
};

void bind_model_link(py::module_& m);

}  // namespace columns
