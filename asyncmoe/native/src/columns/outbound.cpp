#include "outbound.h"

#include <cstring>
#include <memory>
#include <utility>

#include "members.h"
#include "tensor.h"

namespace columns {
namespace {

// Whether a number is one of T's.
template <typename T>
bool fits(int64_t number, T* value) {
    *value = static_cast<T>(number);
    return number >= 0 && static_cast<int64_t>(*value) == number;
}

// A member of a parcel that is a whole number; false if it is none that fits.
template <typename T>
bool whole(const Member& member, PyObject* parcel, T* value) {
    const long long number = PyLong_AsLongLong(member.of(parcel));
    if (number == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
    }
    return fits(number, value);
}

// Dtype, shape and memory of a payload; false if it is not contiguous rows of a dtype of ours.
// `noted`: what is known of it, or null.
bool describe(const py::object& tensor, const TensorRows* noted, Prelude* head, Payload* payload) {
    TensorRows found;
    if (noted != nullptr) {
        found = *noted;
    } else if (!describe(tensor, &found)) {
        return false;
    }
    if (found.rows != head->rows || found.hidden < 0 || found.hidden > 0xffffffffll) return false;
    head->dtype = found.dtype;
    head->hidden = static_cast<uint32_t>(found.hidden);
    head->payload_bytes = uint64_t{head->rows} * head->hidden * item_bytes(head->dtype);
    *payload = {tensor, found.data, head->payload_bytes};
    return true;
}

py::object new_posted(PyObject* source_free) {
    const auto& of = members().posted;
    py::object posted = blank(names().posted);
    of.source_free.set(posted.ptr(), source_free);
    of.error.set(posted.ptr(), Py_None);
    of.callback.set(posted.ptr(), Py_None);
    return posted;
}

// As `Posted.complete` without an error.
void complete(const py::object& posted) {
    const auto& of = members().posted;
    if (of.source_free.of(posted.ptr()) == Py_True) return;
    of.source_free.set(posted.ptr(), Py_True);
    const auto callback = py::reinterpret_borrow<py::object>(of.callback.of(posted.ptr()));
    if (callback.is_none()) return;
    call(callback, posted);
    of.callback.set(posted.ptr(), Py_None);
}

}  // namespace

Outbound::Frame Outbound::begun() const {
    Frame frame{};
    frame.head.kind = kParcel;
    frame.head.source = rank_;
    frame.head.generation = generation_;
    return frame;
}

// `parcel()`: the parcel as a Python object.
template <typename F>
Outbound::Frame Outbound::checked(Frame frame, bool plain, F parcel) const {
    Prelude& head = frame.head;
    const py::ssize_t size = PyObject_Size(frame.columns.ptr());
    head.column_bytes = static_cast<uint32_t>(size);
    if (!plain || size != static_cast<py::ssize_t>(head.column_bytes) ||
        !allowed_parcel(head, limits_)) {
        names().encode_parcel(parcel(), limits_object_, py::arg("source") = rank_,
                              py::arg("sequence") = 0, py::arg("lease") = 0,
                              py::arg("generation") = 0);  // which says what is wrong
        throw py::value_error("a parcel that cannot be sent");
    }
    return frame;
}

Outbound::Frame Outbound::frame(py::handle parcel) const {
    const auto& of = members().parcel;
    const bool is_packed = Py_IS_TYPE(
        parcel.ptr(), reinterpret_cast<PyTypeObject*>(names().packed_parcel.ptr()));
    const py::object packed = is_packed ? py::reinterpret_borrow<py::object>(parcel)
                                        : call(names().pack, parcel);
    Frame frame = begun();
    Prelude& head = frame.head;
    const auto member = [&](const Member& which) {
        return py::reinterpret_borrow<py::object>(which.of(packed.ptr()));
    };
    const py::object payload = member(of.payload);
    const bool plain = whole(of.kind, packed.ptr(), &head.parcel_class) &&
                       whole(of.stage, packed.ptr(), &head.stage) &&
                       whole(of.count, packed.ptr(), &head.rows) &&
                       whole(of.pairs, packed.ptr(), &head.pairs) &&
                       whole(of.credits, packed.ptr(), &head.credits) &&
                       describe(payload, Described::of(of.described.of(packed.ptr()), payload),
                                &head, &frame.payload);
    frame.columns = member(of.block);
    return checked(std::move(frame), plain, [&] { return packed; });
}

Outbound::Frame Outbound::frame(const PackedView& parcel) const {
    Frame frame = begun();
    Prelude& head = frame.head;
    const TensorRows* noted = parcel.described.dtype == 0 ? nullptr : &parcel.described;
    const bool plain = fits(parcel.kind, &head.parcel_class) && fits(parcel.stage, &head.stage) &&
                       fits(parcel.rows, &head.rows) && fits(parcel.pairs, &head.pairs) &&
                       fits(parcel.credits, &head.credits) &&
                       describe(parcel.payload, noted, &head, &frame.payload);
    frame.columns = parcel.block;
    return checked(std::move(frame), plain, [&] { return parcel.object(); });
}

py::object Outbound::number(Frame* frame) {
    count(frame);
    py::object posted = new_posted(Py_False);
    if (PyDict_SetItem(unsent_.ptr(), posted.ptr(), Py_None) != 0) throw py::error_already_set();
    return posted;
}

py::object Outbound::number_free(Frame* frame) {
    count(frame);
    return new_posted(Py_True);
}

py::bytes Outbound::message(uint64_t length) {
    Prelude head{};
    head.kind = kMessage;
    head.source = rank_;
    head.sequence = sequence_[kControl];
    head.payload_bytes = length;
    if (!allowed_control(head, limits_)) {
        py::module_::import("asyncmoe.wire")
            .attr("encode_message")(rank_, head.sequence, length, limits_object_);
        throw py::value_error("a message that cannot be sent");
    }
    ++sequence_[kControl];
    uint8_t* out;
    py::bytes prelude = new_bytes(kPreludeBytes, &out);
    write_prelude(head, out);
    return prelude;
}

void Outbound::sent(const py::object& posted) {
    if (PyDict_DelItem(unsent_.ptr(), posted.ptr()) != 0) PyErr_Clear();
    complete(posted);
}

void Outbound::fail(py::object error) {
    py::dict unsent;
    std::swap(unsent, unsent_);
    for (const auto& each : unsent) each.first.attr("complete")(error);
}

py::list Outbound::sequences() const {
    py::list numbers;
    for (const uint64_t next : sequence_) numbers.append(next);
    return numbers;
}

py::bytes encoded(const Outbound::Frame& frame) {
    const Bytes columns(frame.columns);
    uint8_t* out;
    py::bytes bytes = new_bytes(kPreludeBytes + columns.size(), &out);
    write_prelude(frame.head, out);
    std::memcpy(out + kPreludeBytes, columns.data(), columns.size());
    return bytes;
}

void bind_outbound(py::module_& m) {
    py::class_<Outbound, std::shared_ptr<Outbound>>(m, "Outbound")
        .def(py::init<uint32_t, uint32_t, py::object>())
        .def(
            "parcel",
            [](Outbound& outbound, py::handle parcel, uint32_t lease, const py::object& of) {
                Outbound::Frame frame = outbound.frame(parcel);
                frame.head.lease = lease;
                if (!of.is_none()) frame.head.generation = of.cast<uint32_t>();
                py::object posted = outbound.number(&frame);
                return py::make_tuple(encoded(frame), posted);
            },
            py::arg("parcel"), py::arg("lease") = 0, py::arg("generation") = py::none())
        .def("message", &Outbound::message)
        .def("sent", &Outbound::sent)
        .def("fail", &Outbound::fail)
        .def_property_readonly("unsent", &Outbound::unsent)
        .def_property_readonly("_sequence", &Outbound::sequences)
        .def_property_readonly("_generation", &Outbound::generation);
}

}  // namespace columns
