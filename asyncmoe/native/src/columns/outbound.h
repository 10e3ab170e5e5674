// What this rank sends to one peer: the compiled twin of `Outbound` in asyncmoe/twophase.py.
#pragma once

#include "parcel.h"

namespace columns {

// A payload in host memory, which `owner` keeps; elsewhere `data` is null.
struct Payload {
    py::object owner;  // the tensor
    const uint8_t* data;
    uint64_t size;
};

class Outbound {
  public:
    Outbound(uint32_t rank, uint32_t generation, py::object limits)
        : rank_(rank), generation_(generation), limits_object_(limits), limits_(limits) {}

    // A parcel's prelude but for `lease` and `generation`, its columns, and its payload; numbers
    // nothing. Raises as `encode_parcel` in asyncmoe/wire.py.
    struct Frame {
        Prelude head;
        py::object columns;
        Payload payload;
    };
    Frame frame(py::handle parcel) const;
    Frame frame(const PackedView& parcel) const;

    // The next parcel of that frame's class is this one: its source side, to be `sent`, or one that
    // is free already.
    py::object number(Frame* frame);
    py::object number_free(Frame* frame);
    // The same if nobody asks for its source side.
    void count(Frame* frame) { frame->head.sequence = sequence_[frame->head.parcel_class]++; }

    py::bytes message(uint64_t length);
    void sent(const py::object& posted);
    void fail(py::object error);
    py::ssize_t unsent() const { return PyDict_Size(unsent_.ptr()); }
    uint32_t generation() const { return generation_; }
    py::list sequences() const;

  private:
    Frame begun() const;
    template <typename F>
    Frame checked(Frame frame, bool plain, F parcel) const;

    const uint32_t rank_, generation_;
    const py::object limits_object_;
    const Limits limits_;
    uint64_t sequence_[kClasses] = {};
    py::dict unsent_;  // of `Posted`, in the order posted
};

// Prelude and columns in one piece.
py::bytes encoded(const Outbound::Frame& frame);

void bind_outbound(py::module_& m);

}  // namespace columns
