#include "shm_port.h"

#include <pybind11/stl.h>

#include "function.h"

namespace columns {
namespace {

constexpr int kParcelsPerTurn = 64;  // of each class

}  // namespace

bool ShmPort::lost() const {
    static PyObject* const error = PyUnicode_InternFromString("error");
    return stopped_ || !get(link_, error).is_none();
}

py::object ShmPort::post(py::handle parcel) {
    if (lost()) {
        if (!stopped_) link_.attr("check")();
        throw std::runtime_error("a port that is stopped");
    }
    Outbound::Frame frame = outbound_->frame(parcel);
    ShmSender& lane = *sending_[frame.head.parcel_class - 1];
    const bool at_once = !turn_;
    if (at_once) {
        told_ = false;
        go_on();
    }
    return lane.post(std::move(frame), at_once);
}

void ShmPort::on_notice() {
    const auto kept = shared_from_this();
    for (const auto& lane : sending_) {
        if (lane->waiting() == 0) continue;
        if (lane->advance()) told_ = false;
        if (lane->may_advance()) go_on();
    }
    wake();
    hand_over();
    progress();
}

// Something is left to do behind this turn of the loop.
void ShmPort::go_on() {
    if (turn_ || stopped_) return;
    if (!turn_of_) {
        turn_of_ = function<0>([weak = weak_from_this()](PyObject* const*) -> py::object {
            if (const auto port = weak.lock()) port->next_turn();
            return py::none();
        });
    }
    turn_ = true;
    const py::object call_soon = call_soon_;
    call(call_soon, turn_of_);
}

void ShmPort::next_turn() {
    turn_ = false;
    if (lost()) return;
    for (const auto& lane : sending_) {
        if (!lane->may_advance()) continue;
        if (lane->advance()) told_ = false;
        if (lane->may_advance()) go_on();
    }
    wake();
    if (more_) take();
    progress();
}

// The peer, if it sleeps and there is something new for it.
void ShmPort::wake() {
    if (told_ || lost()) return;
    told_ = true;
    if (bell_->due()) {
        const py::object notify = notify_;
        call(notify);
    }
}

void ShmPort::take() {
    const auto kept = shared_from_this();
    const py::object link = link_;
    try {
        hand_over();
    } catch (py::error_already_set& error) {
        if (!error.matches(names().protocol_error)) throw;
        link.attr("lose")(py::str("malformed frame: {}").format(error.value()));
    }
}

void ShmPort::hand_over() {
    while (!stopped_) {
        more_ = receiving_[0]->take(kParcelsPerTurn);
        more_ |= receiving_[1]->take(kParcelsPerTurn);
        if (more_) return go_on();
        if (lost()) return;
        bell_->sleep();
        if (!receiving_[0]->pending() && !receiving_[1]->pending()) return;
    }
}

void ShmPort::take_all() {
    const auto kept = shared_from_this();
    for (const auto& lane : receiving_) {
        while (lane->take(kParcelsPerTurn)) {
        }
    }
}

void ShmPort::progress() {
    if (on_progress.is_none()) return;
    const py::object on_progress = this->on_progress;
    call(on_progress);
}

void ShmPort::stop() {
    stopped_ = true;
    for (const auto& lane : sending_) lane->clear();
    for (const auto& lane : receiving_) lane->stop();
    link_ = call_soon_ = notify_ = on_progress = py::none();
}

void bind_shm_port(py::module_& m) {
    py::class_<ShmPort, std::shared_ptr<ShmPort>>(m, "ShmPort")
        .def(py::init<std::shared_ptr<Outbound>, ShmPort::Senders, ShmPort::Receivers,
                      std::shared_ptr<ShmBell>, py::object, py::object, py::object>())
        .def_property_readonly("post",
                               [](const std::shared_ptr<ShmPort>& port) {
                                   return function<1>([port](PyObject* const* arguments) {
                                       return port->post(arguments[0]);
                                   });
                               })
        .def("on_notice", &ShmPort::on_notice)
        .def("take", &ShmPort::take)
        .def("take_all", &ShmPort::take_all)
        .def("stop", &ShmPort::stop)
        .def_property_readonly("waiting", &ShmPort::waiting)
        .def_readwrite("on_progress", &ShmPort::on_progress);
}

}  // namespace columns
