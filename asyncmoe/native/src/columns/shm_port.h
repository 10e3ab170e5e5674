// Both directions of a pair that shares memory: the compiled twin of `Port` in
// transports/shm_port.py.
#pragma once

#include <array>
#include <memory>
#include <utility>

#include "shm_receiver.h"
#include "shm_sender.h"

namespace columns {

class ShmPort : public std::enable_shared_from_this<ShmPort> {
  public:
    using Senders = std::array<std::shared_ptr<ShmSender>, 2>;
    using Receivers = std::array<std::shared_ptr<ShmReceiver>, 2>;

    ShmPort(std::shared_ptr<Outbound> outbound, Senders sending, Receivers receiving,
            std::shared_ptr<ShmBell> bell, py::object link, py::object call_soon,
            py::object notify)
        : outbound_(std::move(outbound)),
          sending_(std::move(sending)),
          receiving_(std::move(receiving)),
          bell_(std::move(bell)),
          link_(std::move(link)),
          call_soon_(std::move(call_soon)),
          notify_(std::move(notify)) {}

    // See the twin.
    py::object post(py::handle parcel);
    void on_notice();
    void take();
    void take_all();
    void stop();
    size_t waiting() const { return sending_[0]->waiting() + sending_[1]->waiting(); }

    py::object on_progress = py::none();

  private:
    bool lost() const;
    void go_on();
    void next_turn();
    void wake();
    void hand_over();
    void progress();

    const std::shared_ptr<Outbound> outbound_;
    const Senders sending_;
    const Receivers receiving_;
    const std::shared_ptr<ShmBell> bell_;
    py::object link_, call_soon_, notify_, turn_of_;  // until it is stopped
    bool stopped_ = false;
    bool turn_ = false;  // whether one is to come
    bool told_ = true;   // the peer, if it sleeps, of all that was published
    bool more_ = false;  // was left for the next turn
};

void bind_shm_port(py::module_& m);

}  // namespace columns
