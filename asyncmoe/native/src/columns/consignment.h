// A parcel between two ranks of the model transport: to its sender it is a `Posted`, to its
// receiver what is called to release it. The compiled twin is in transports/model_link.py.
#pragma once

#include "boxed.h"

namespace columns {

struct Port;

struct Consignment {
    enum class State : uint8_t { kOnItsWay, kHeld, kFree };

    Ref<Port> taker;  // null once it is free
    State state = State::kOnItsWay;
    bool source_free = false;
    py::object error, callback;  // null: none
    Consignment *before = nullptr, *behind = nullptr;  // in the list of its link
    PyObject* self = nullptr;

    // The receiver has it.
    void hold();
    // It was read for the last time. Raises RuntimeError if it was already.
    void release();
    // The source is free, or was given up. Idempotent.
    void complete(const py::object& with_error);

    int visit(visitproc visit, void* arg);
    void clear();
};

// Those of a link whose source is not free, in the order posted; owned.
class Unsent {
  public:
    Unsent() = default;
    Unsent(const Unsent&) = delete;
    Unsent& operator=(const Unsent&) = delete;
    ~Unsent();

    void add(const Ref<Consignment>& consignment);
    int visit(visitproc visit, void* arg) const;
    // Completes all of them.
    void fail(const py::object& error);

  private:
    friend struct Consignment;

    static void remove(Consignment& consignment);

    // A ring through this one, which holds no parcel.
    Consignment ends_;
};

void bind_consignment(py::module_& m);

}  // namespace columns
