#include "matched.h"

namespace columns {
namespace {

[[noreturn]] void refuse(const std::string& why) {
    PyErr_SetString(names().protocol_error, why.c_str());
    throw py::error_already_set();
}

std::string text(uint64_t number) { return std::to_string(number); }

}  // namespace

MatchedSending::MatchedSending(std::shared_ptr<Outbound> outbound, py::object notice,
                               py::object on_ready, size_t most_parcels, uint64_t most_bytes,
                               uint64_t burst_bytes)
    : outbound_(std::move(outbound)),
      notice_(std::move(notice)),
      on_ready_(std::move(on_ready)),
      burst_bytes_(burst_bytes) {
    const Lane lane{MatchedWindow(most_parcels, most_bytes), {}, {}};
    for (int kind = 0; kind < kClasses; ++kind) lanes_.push_back(lane);
}

py::object MatchedSending::post(py::handle parcel) {
    Outbound::Frame frame = outbound_->frame(parcel);
    py::object posted = outbound_->number(&frame);
    const uint64_t size = frame.payload.size;
    Lane& lane = lanes_[frame.head.parcel_class];
    Outgoing outgoing{encoded(frame), std::move(frame.payload.owner), posted, size,
                      frame.head.column_bytes + size};
    if (!lane.held.empty() || !lane.window.put(outgoing.nbytes)) {
        lane.held.push_back(std::move(outgoing));
    } else {
        announce(&lane, std::move(outgoing));
    }
    return posted;
}

void MatchedSending::announce(Lane* lane, Outgoing outgoing) {
    const bool first = frames_.empty();
    frames_.append(outgoing.frame);
    if (outgoing.size != 0) {
        payloads_.append(outgoing.payload);
        posted_.append(outgoing.posted);
        gathered_ += outgoing.size;
        if (!notice_.is_none() && gathered_ >= burst_bytes_) end_burst();
    }
    lane->out.push_back(std::move(outgoing));
    if (first) call(on_ready_);
}

void MatchedSending::end_burst() {
    if (payloads_.empty()) return;
    bursts_.append(py::make_tuple(payloads_, posted_));
    payloads_ = py::list();
    posted_ = py::list();
    gathered_ = 0;
    if (!notice_.is_none()) frames_.append(notice_);
}

py::tuple MatchedSending::leave() {
    end_burst();
    py::tuple left = py::make_tuple(frames_, bursts_);
    frames_ = py::list();
    bursts_ = py::list();
    return left;
}

int64_t MatchedSending::taken(int kind, size_t count) {
    Lane& lane = lanes_[kind];
    if (count > lane.window.parcels()) {
        refuse(text(count) + " parcels taken; announced: " + text(lane.window.parcels()));
    }
    lane.window.take(count);
    int64_t payloads = 0;
    for (; count != 0 && !lane.out.empty(); --count) {  // who is told may stop this
        const Outgoing outgoing = std::move(lane.out.front());
        lane.out.pop_front();
        payloads += outgoing.size != 0;
        outbound_->sent(outgoing.posted);
    }
    while (!lane.held.empty() && lane.window.put(lane.held.front().nbytes)) {
        Outgoing outgoing = std::move(lane.held.front());
        lane.held.pop_front();
        announce(&lane, std::move(outgoing));
    }
    return payloads;
}

bool MatchedSending::idle() const {
    for (const Lane& lane : lanes_) {
        if (!lane.held.empty() || lane.window.parcels() != 0) return false;
    }
    return true;
}

void MatchedSending::stop() {
    for (Lane& lane : lanes_) {
        lane.held.clear();
        lane.out.clear();
    }
    frames_ = bursts_ = payloads_ = posted_ = py::list();
    gathered_ = 0;
}

MatchedReceiving::MatchedReceiving(py::object on_ready, py::object on_whole, size_t most_parcels,
                                   uint64_t most_bytes)
    : on_ready_(std::move(on_ready)), on_whole_(std::move(on_whole)) {
    const Lane lane{MatchedWindow(most_parcels, most_bytes), {}, 0, 0};
    for (int kind = 0; kind < kClasses; ++kind) lanes_.push_back(lane);
}

// The window is looked at before anything is allocated.
void MatchedReceiving::place(const Transfer& transfer) {
    MatchedWindow& window = lanes_[transfer.head.parcel_class].window;
    const uint64_t nbytes = transfer.head.column_bytes + transfer.head.payload_bytes;
    if (!window.put(nbytes)) {
        refuse("a parcel of " + text(nbytes) + " bytes behind " + text(window.parcels()) +
               " with " + text(window.nbytes()) + " bytes that were not taken; allowed: " +
               text(window.most_parcels()) + " with " + text(window.most_bytes()) + " bytes");
    }
}

void MatchedReceiving::announced(std::shared_ptr<Transfer> transfer) {
    if (!inbound_) return;
    lanes_[transfer->head.parcel_class].coming.push_back(transfer);
    if (transfer->head.payload_bytes == 0) {
        arrived_one(transfer);
        return;
    }
    waiting_.append(std::move(transfer));
    if (waiting_.size() == 1 && !on_ready_.is_none()) call(on_ready_);
}

py::list MatchedReceiving::take() {
    py::list taken = waiting_;
    waiting_ = py::list();
    return taken;
}

void MatchedReceiving::arrived(const py::list& transfers) {
    for (const py::handle each : transfers) {
        if (!inbound_) return;
        arrived_one(each.cast<std::shared_ptr<Transfer>>());
    }
}

void MatchedReceiving::arrived_one(const std::shared_ptr<Transfer>& transfer) {
    const std::shared_ptr<Inbound> inbound = inbound_;
    inbound->arrived(*transfer);
    if (!inbound_) return;
    Lane& lane = lanes_[transfer->head.parcel_class];
    if (lane.coming.front() != transfer) {
        ++lane.early;
        return;
    }
    lane.coming.pop_front();
    ++lane.whole;
    while (lane.early != 0 && lane.coming.front()->lease->state() != State::kFilling) {
        lane.coming.pop_front();
        --lane.early;
        ++lane.whole;
    }
    if (!telling_) {
        telling_ = true;
        call(on_whole_);
    }
}

py::list MatchedReceiving::told() {
    py::list told;
    telling_ = false;
    for (int kind = 0; kind < kClasses; ++kind) {
        Lane& lane = lanes_[kind];
        if (lane.whole == 0) continue;
        told.append(py::make_tuple(kind, lane.whole));
        lane.window.take(lane.whole);
        lane.whole = 0;
    }
    return told;
}

void MatchedReceiving::stop() {
    inbound_.reset();
    waiting_ = py::list();
    for (Lane& lane : lanes_) lane.coming.clear();
}

void bind_matched(py::module_& m) {
    py::class_<MatchedSending>(m, "MatchedSending")
        .def(py::init<std::shared_ptr<Outbound>, py::object, py::object, size_t, uint64_t,
                      uint64_t>())
        .def("post", &MatchedSending::post)
        .def("taken", &MatchedSending::taken)
        .def("leave", &MatchedSending::leave)
        .def("stop", &MatchedSending::stop)
        .def_property_readonly("idle", &MatchedSending::idle);
    py::class_<MatchedReceiving>(m, "MatchedReceiving")
        .def(py::init<py::object, py::object, size_t, uint64_t>())
        .def("begin", &MatchedReceiving::begin)
        .def("place", &MatchedReceiving::place)
        .def("announced", &MatchedReceiving::announced)
        .def("take", &MatchedReceiving::take)
        .def("arrived", &MatchedReceiving::arrived)
        .def("told", &MatchedReceiving::told)
        .def("stop", &MatchedReceiving::stop);
}

}  // namespace columns
