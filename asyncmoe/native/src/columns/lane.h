// One rank's callbacks and its host's time: the compiled twin of `PlainLane` in
// asyncmoe/virtual/plainloop.py.
#pragma once

#include <algorithm>

#include "boxed.h"
#include "ring.h"

namespace columns {

struct Timeline;
struct Lane;

// Something that happens in a lane and that no Python callback stands for.
class Event {
  public:
    virtual ~Event() = default;
    // Raises what Python raises. Called once, within `context`.
    virtual void run() = 0;
    virtual PyObject* context() const = 0;
    virtual Lane& lane() const = 0;
    // What the plain loop would call: for whoever watches, and for messages about faults.
    virtual PyObject* callback() const = 0;
    virtual int visit(visitproc visit, void* arg) const = 0;
};

// A callback that Python made: what `call_soon` and `call_at` return.
struct Handle {
    Lane* lane = nullptr;  // there while it is `scheduled` or ready
    double when_s = 0;
    py::object callback, args, context;  // null once it has run or was cancelled
    bool cancelled = false, scheduled = false;

    int visit(visitproc visit, void* arg);
    void clear();
};

// A handle or event, owned, or a lane that is to be looked at again; moved by hand, as plain bytes.
class Due {
  public:
    Due() = default;
    static Due of(Ref<Handle> handle) { return Due(handle.release(), 0); }
    static Due of(Event* event) { return Due(event, 1); }
    static Due of(Lane* lane) { return Due(lane, 2); }

    // Null where it is something else.
    PyObject* object() const { return tag() == 0 ? reinterpret_cast<PyObject*>(bits_) : nullptr; }
    Handle* handle() const { return tag() == 0 ? &unboxed<Handle>(object()) : nullptr; }
    Event* event() const { return tag() == 1 ? reinterpret_cast<Event*>(bits_ - 1) : nullptr; }
    Lane* lane() const { return tag() == 2 ? reinterpret_cast<Lane*>(bits_ - 2) : nullptr; }

    void drop() const;
    int visit(visitproc visit, void* arg) const;

  private:
    template <typename T>
    Due(T* pointer, uintptr_t tag) : bits_(reinterpret_cast<uintptr_t>(pointer) | tag) {}
    uintptr_t tag() const { return bits_ & 3; }

    uintptr_t bits_;
};

struct Lane {
    Timeline* timeline = nullptr;  // which `loop` keeps; null once the collector took it apart
    py::object loop, name, costs, context;
    double free_s = 0, worked_s = 0, hidden_s = 0, busy_from_s = 0, busy_until_s = 0;
    double seen_s = 0;
    bool is_seen = false, dead = false, queued = false;
    Ring<Due> ready;

    ~Lane() { kill(); }
    // Seconds; see the twin.
    double charge(double seconds);
    double compute(double before_s, double seconds);
    void counts(double seconds) {
        if (seconds != 0) {
            seen_s = worked_s - seconds;
            is_seen = true;
        }
    }
    double clock() {
        const bool was_seen = is_seen;
        is_seen = false;
        return was_seen ? seen_s : worked_s;
    }
    void kill();

    int visit(visitproc visit, void* arg);
    void clear();
};

void bind_lane(py::module_& m);

}  // namespace columns
