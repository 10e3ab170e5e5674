#include "inbound.h"

#include <cstring>
#include <utility>

#include "intake.h"
#include "members.h"
#include "wire.h"

namespace columns {
namespace {

// The receiver's faults are not the peer's, and go to the loop; a ProtocolError is the peer's.
template <typename F>
void guard(const py::object& source, F call_receiver) {
    try {
        call_receiver();
    } catch (py::error_already_set& error) {
        if (error.matches(names().protocol_error) || !error.matches(PyExc_Exception)) throw;
        const py::object value = error.value();
        names().report_fault(source, value);
    }
}

}  // namespace

Inbound::Inbound(uint32_t source, uint32_t generation, py::object limits,
                 std::shared_ptr<Pool> leases, py::object on_parcel, py::object on_message,
                 py::object place)
    : source_(source),
      generation_(generation),
      source_object_(py::int_(source)),
      limits_object_(limits),
      limits_(limits),
      leases_(std::move(leases)),
      on_parcel_(std::move(on_parcel)),
      on_message_(std::move(on_message)),
      place_(std::move(place)),
      intake_(Intake::of(on_parcel_)) {}

std::shared_ptr<Transfer> Inbound::admit(const Prelude& head, std::shared_ptr<Lease> lease) {
    auto transfer = std::make_shared<Transfer>(Transfer{head, py::object(), std::move(lease)});
    queues_[head.parcel_class].push_back(transfer);
    return transfer;
}

void Inbound::refuse(const uint8_t* head) const {
    const py::bytes bytes(reinterpret_cast<const char*>(head), kPreludeBytes);
    names().decode_prelude(bytes, limits_object_);  // which says what is wrong
    PyErr_SetString(names().protocol_error, "a frame that is not allowed");
    throw py::error_already_set();
}

std::shared_ptr<Transfer> Inbound::accept(const Prelude& head, std::shared_ptr<Lease> lease) {
    check_order(head);
    auto transfer = std::make_shared<Transfer>(Transfer{head, py::object(), std::move(lease)});
    if (!transfer->lease && !place_.is_none()) {
        const py::object place = place_, placed = call(place, py::cast(transfer));
        if (!placed.is_none()) transfer->lease = placed.cast<std::shared_ptr<Lease>>();
    }
    if (!transfer->lease) {
        if (head.lease != 0 || head.generation != generation_) {
            names().refuse_place(head.lease, head.generation, generation_);
        }
        transfer->lease = leases_->obtain(static_cast<int64_t>(head.payload_bytes));
    }
    queues_[head.parcel_class].push_back(transfer);
    return transfer;
}

void Inbound::arrived(const Transfer& transfer) {
    transfer.lease->arrived();
    Queue& queue = queues_[transfer.head.parcel_class];
    while (!queue.empty() && queue.front()->lease->state() == State::kHeld) {
        const std::shared_ptr<Transfer> next = queue.front();
        if (intake_ && is_sound(*next)) {
            queue.pop_front();
            if (!take(*next)) deliver(*next, parcel_of(*next));
            continue;
        }
        const py::object parcel = parcel_of(*next);
        queue.pop_front();
        deliver(*next, parcel);
    }
}

void Inbound::deliver(const Transfer& transfer, const py::object& parcel) {
    const auto& of = members().arrival;
    const py::object arrival = blank(names().arrival), on_parcel = on_parcel_;
    of.source.set(arrival.ptr(), source_object_);
    of.parcel.set(arrival.ptr(), parcel);
    of.release.set(arrival.ptr(), Release(transfer.lease).object());
    try {
        guard(source_object_, [&] { call(on_parcel, arrival); });
    } catch (py::error_already_set&) {  // the receiver refused the parcel
        if (transfer.lease->state() == State::kHeld) transfer.lease->release();
        throw;
    }
}

void Inbound::deliver_message(const py::bytes& message) {
    const py::object on_message = on_message_;
    guard(source_object_, [&] { call(on_message, source_object_, message); });
}

py::list Inbound::abandon() {
    py::list given_up;
    for (Queue& queue : queues_) {
        Queue left;
        std::swap(left, queue);
        for (const auto& transfer : left) {
            if (transfer->lease->state() == State::kHeld) {
                transfer->lease->release();  // whole, so quiet
            } else {
                transfer->lease->abandon();
                given_up.append(transfer->lease);
            }
        }
    }
    // They refer to who refers to this, and nothing is handed over any more.
    on_parcel_ = on_message_ = place_ = py::none();
    intake_.reset();
    return given_up;
}

void Inbound::check_order(const Prelude& head) {
    uint64_t& expected = sequence_[head.parcel_class];
    if (head.source != source_ || head.sequence != expected) {
        names().refuse_order(head.parcel_class, head.source, source_, head.sequence, expected);
    }
    ++expected;
}

bool Inbound::is_sound(const Transfer& transfer) const {
    const Prelude& head = transfer.head;
    const Bytes bytes(transfer.columns);
    return bytes.size() == static_cast<py::ssize_t>(head.column_bytes) &&
           (head.parcel_class != kDispatch || head.rows == 0 ||
            consistent(bytes.data(), head.rows, head.pairs, limits_.experts));
}

py::object Inbound::rows_of(const Transfer& transfer) const {
    const Prelude& head = transfer.head;
    return transfer.lease->block().rows(names().dtypes[head.dtype], head.rows, head.hidden);
}

// Hands a sound parcel over without making a Python object of it; false if that is needed.
bool Inbound::take(const Transfer& transfer) {
    const std::shared_ptr<Intake> intake = intake_;
    try {
        return intake->take(source_, transfer.head.dtype,
                            PackedView(transfer.head, transfer.columns, rows_of(transfer)),
                            Release(transfer.lease));
    } catch (py::error_already_set&) {  // the receiver refused the parcel
        if (transfer.lease->state() == State::kHeld) transfer.lease->release();
        throw;
    }
}

// The twin is `decode_parcel` in asyncmoe/wire.py.
py::object Inbound::parcel_of(const Transfer& transfer) const {
    const Prelude& head = transfer.head;
    const py::object parcel = make_parcel(head.parcel_class, head.stage, head.rows, head.pairs,
                                          transfer.columns, rows_of(transfer), head.credits,
                                          py::none());
    if (!is_sound(transfer)) names().check_parcel(parcel, head.column_bytes, limits_object_);
    return parcel;
}

void bind_inbound(py::module_& m) {
    py::class_<Transfer, std::shared_ptr<Transfer>> transfer(m, "Transfer");
    transfer.def_readwrite("columns", &Transfer::columns)
        .def_readonly("lease", &Transfer::lease)
        .def_property_readonly("payload",
                               [](const Transfer& each) { return each.lease->memory(); })
        .def_property_readonly("rows", [](const Transfer& each) {
            return each.lease->block().rows(names().dtypes[each.head.dtype], each.head.rows,
                                            each.head.hidden);
        });
    const auto field = [&transfer](const char* name, auto member) {
        transfer.def_property_readonly(
            name, [member](const Transfer& each) { return each.head.*member; });
    };
    field("parcel_class", &Prelude::parcel_class);
    field("sequence", &Prelude::sequence);
    field("slot", &Prelude::lease);
    field("generation", &Prelude::generation);
    field("column_bytes", &Prelude::column_bytes);
    field("payload_bytes", &Prelude::payload_bytes);
    py::class_<Inbound, std::shared_ptr<Inbound>>(m, "Inbound")
        .def(py::init<uint32_t, uint32_t, py::object, std::shared_ptr<Pool>, py::object,
                      py::object, py::object>())
        .def("accept",
             [](Inbound& inbound, const py::tuple& prelude, py::object columns,
                std::shared_ptr<Lease> lease) {
                 const auto accepted = inbound.accept(prelude_of(prelude), std::move(lease));
                 accepted->columns = std::move(columns);
                 return accepted;
             },
             py::arg("prelude"), py::arg("columns") = py::none(), py::arg("lease") = py::none())
        .def("arrived", [](Inbound& inbound, const Transfer& each) { inbound.arrived(each); })
        .def("message",
             [](Inbound& inbound, const py::tuple& prelude) {
                 inbound.accept_message(prelude_of(prelude));
             })
        .def("abandon", &Inbound::abandon);
}

}  // namespace columns
