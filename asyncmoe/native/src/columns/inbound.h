// What one peer sends to this rank: the compiled twin of `Inbound` in asyncmoe/twophase.py.
#pragma once

#include <deque>
#include <memory>

#include "lease.h"

namespace columns {

class Intake;

// One parcel on its way in.
struct Transfer {
    Prelude head;
    py::object columns;            // bytes; null until they are there
    std::shared_ptr<Lease> lease;  // null while its place is looked for
};

class Inbound {
  public:
    // `on_parcel`, `on_message`: the receiver's. `place`: see the twin; None: the pool's.
    Inbound(uint32_t source, uint32_t generation, py::object limits, std::shared_ptr<Pool> leases,
            py::object on_parcel, py::object on_message, py::object place);

    // The steps of a parcel and of a message; they raise ProtocolError as the twin does.
    std::shared_ptr<Transfer> accept(const Prelude& head, std::shared_ptr<Lease> lease = nullptr);
    void arrived(const Transfer& transfer);
    // The two halves of `accept`: number a frame, and take it with a lease.
    void check_order(const Prelude& head);
    std::shared_ptr<Transfer> admit(const Prelude& head, std::shared_ptr<Lease> lease);
    // Raises ProtocolError for 64 bytes that are no prelude, or one that is not allowed.
    [[noreturn]] void refuse(const uint8_t* head) const;
    void accept_message(const Prelude& head) { check_order(head); }
    void deliver_message(const py::bytes& message);
    py::list abandon();

    const Limits& limits() const { return limits_; }

  private:
    using Queue = std::deque<std::shared_ptr<Transfer>>;

    bool is_sound(const Transfer& transfer) const;
    py::object rows_of(const Transfer& transfer) const;
    bool take(const Transfer& transfer);
    py::object parcel_of(const Transfer& transfer) const;
    void deliver(const Transfer& transfer, const py::object& parcel);

    const uint32_t source_, generation_;
    const py::object source_object_, limits_object_;
    const Limits limits_;
    const std::shared_ptr<Pool> leases_;
    py::object on_parcel_, on_message_, place_;  // until the peer is given up
    std::shared_ptr<Intake> intake_;             // likewise: whose method `on_parcel` is, or null
    uint64_t sequence_[kClasses] = {};
    Queue queues_[kClasses];
};

void bind_inbound(py::module_& m);

}  // namespace columns
