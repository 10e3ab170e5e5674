#include "outbound.h"

#include <cstring>
#include <memory>
#include <utility>

namespace columns {
namespace {

struct Attributes {
    PyObject* const kind = PyUnicode_InternFromString("kind");
    PyObject* const stage = PyUnicode_InternFromString("stage");
    PyObject* const count = PyUnicode_InternFromString("count");
    PyObject* const pairs = PyUnicode_InternFromString("pairs");
    PyObject* const block = PyUnicode_InternFromString("block");
    PyObject* const payload = PyUnicode_InternFromString("payload");
    PyObject* const credits = PyUnicode_InternFromString("credits");
    PyObject* const dtype = PyUnicode_InternFromString("dtype");
    PyObject* const shape = PyUnicode_InternFromString("shape");
    PyObject* const is_cpu = PyUnicode_InternFromString("is_cpu");
    PyObject* const is_contiguous = PyUnicode_InternFromString("is_contiguous");
    PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject* const source_free = PyUnicode_InternFromString("source_free");
    PyObject* const error = PyUnicode_InternFromString("error");
    PyObject* const callback = PyUnicode_InternFromString("_callback");
};

const Attributes& attributes() {
    static const Attributes found;
    return found;
}

// A method without arguments.
py::object invoke(py::handle object, PyObject* method) {
    PyObject* of[] = {nullptr, object.ptr()};
    PyObject* result = PyObject_VectorcallMethod(
        method, of + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
}

// An attribute for which `__getattr__` is not to be asked, nor looked for.
py::object slot(py::handle object, PyObject* name) {
    PyObject* value = PyObject_GenericGetAttr(object.ptr(), name);
    if (value == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
}

// Such an attribute that is a whole number; false if it is none that fits.
template <typename T>
bool whole(py::handle object, PyObject* name, T* value) {
    const py::object found = slot(object, name);
    const long long number = PyLong_AsLongLong(found.ptr());
    if (number == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
    }
    *value = static_cast<T>(number);
    return number >= 0 && static_cast<long long>(*value) == number;
}

uint8_t code_of(const py::object& dtype) {
    for (uint8_t code = 1; code <= kDtypes; ++code) {
        if (names().dtypes[code].ptr() == dtype.ptr()) return code;
    }
    return 0;
}

// Dtype, shape and memory of a payload; false if it is not contiguous rows of a dtype of ours.
bool describe(const py::object& tensor, Prelude* head, Payload* payload) {
    const Attributes& names_of = attributes();
    head->dtype = code_of(get(tensor, names_of.dtype));
    const py::object shape = get(tensor, names_of.shape);
    if (head->dtype == 0 || !PyTuple_Check(shape.ptr()) || PyTuple_GET_SIZE(shape.ptr()) != 2 ||
        invoke(tensor, names_of.is_contiguous).ptr() != Py_True) {
        return false;
    }
    const long long rows = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), 0));
    const long long hidden = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), 1));
    if (rows != head->rows || hidden < 0 || hidden > 0xffffffffll) return false;
    head->hidden = static_cast<uint32_t>(hidden);
    head->payload_bytes = uint64_t{head->rows} * head->hidden * item_bytes(head->dtype);
    payload->owner = tensor;
    payload->size = head->payload_bytes;
    payload->data = nullptr;
    if (get(tensor, names_of.is_cpu).ptr() == Py_True) {
        const py::object address = invoke(tensor, names_of.data_ptr);
        payload->data = static_cast<const uint8_t*>(PyLong_AsVoidPtr(address.ptr()));
    }
    return true;
}

py::object new_posted(PyObject* source_free) {
    const Attributes& names_of = attributes();
    py::object posted = blank(names().posted);
    set(posted, names_of.source_free, source_free);
    set(posted, names_of.error, Py_None);
    set(posted, names_of.callback, Py_None);
    return posted;
}

// As `Posted.complete` without an error.
void complete(const py::object& posted) {
    const Attributes& names_of = attributes();
    if (get(posted, names_of.source_free).ptr() == Py_True) return;
    set(posted, names_of.source_free, Py_True);
    const py::object callback = get(posted, names_of.callback);
    if (callback.is_none()) return;
    call(callback, posted);
    set(posted, names_of.callback, Py_None);
}

}  // namespace

Outbound::Frame Outbound::frame(py::handle parcel) const {
    const Attributes& names_of = attributes();
    const bool is_packed = Py_TYPE(parcel.ptr()) ==
                           reinterpret_cast<PyTypeObject*>(names().packed_parcel.ptr());
    const py::object packed = is_packed ? py::reinterpret_borrow<py::object>(parcel)
                                        : call(names().pack, parcel);
    Frame frame{};
    Prelude& head = frame.head;
    head.kind = kParcel;
    head.source = rank_;
    head.generation = generation_;
    const bool plain = whole(packed, names_of.kind, &head.parcel_class) &&
                       whole(packed, names_of.stage, &head.stage) &&
                       whole(packed, names_of.count, &head.rows) &&
                       whole(packed, names_of.pairs, &head.pairs) &&
                       whole(packed, names_of.credits, &head.credits) &&
                       describe(slot(packed, names_of.payload), &head, &frame.payload);
    frame.columns = slot(packed, names_of.block);
    const py::ssize_t size = PyObject_Size(frame.columns.ptr());
    head.column_bytes = static_cast<uint32_t>(size);
    if (!plain || size != static_cast<py::ssize_t>(head.column_bytes) ||
        !allowed_parcel(head, limits_)) {
        names().encode_parcel(packed, limits_object_, py::arg("source") = rank_,
                              py::arg("sequence") = 0, py::arg("lease") = 0,
                              py::arg("generation") = 0);  // which says what is wrong
        throw py::value_error("a parcel that cannot be sent");
    }
    return frame;
}

py::object Outbound::number(Frame* frame) {
    frame->head.sequence = sequence_[frame->head.parcel_class]++;
    py::object posted = new_posted(Py_False);
    if (PyDict_SetItem(unsent_.ptr(), posted.ptr(), Py_None) != 0) throw py::error_already_set();
    return posted;
}

py::object Outbound::number_free(Frame* frame) {
    frame->head.sequence = sequence_[frame->head.parcel_class]++;
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
