#include "shm_receiver.h"

#include <cstring>
#include <string>

namespace columns {
namespace {

[[noreturn]] void refuse(const std::string& why) {
    PyErr_SetString(names().protocol_error, why.c_str());
    throw py::error_already_set();
}

std::string text(int64_t number) { return std::to_string(number); }

}  // namespace

bool ShmReceiver::take(int most) {
    for (int number = 0; number < most; ++number) {
        if (!inbound_) return false;
        const uint32_t published = load(theirs_->published(kind_));
        if (published == taken_) return false;
        take_next(published);
    }
    return pending();
}

// Everything is copied out of the peer's reach before it is looked at, but for the payload.
void ShmReceiver::take_next(uint32_t published) {
    if (published - taken_ > static_cast<uint64_t>(theirs_->slots)) {
        refuse("word published is " + text(published) + "; allowed: " + text(taken_) + " to " +
               text(taken_ + theirs_->slots));
    }
    uint8_t bytes[kPreludeBytes];
    std::memcpy(bytes, theirs_->entry(kind_, taken_), kPreludeBytes);
    const std::shared_ptr<Inbound> inbound = inbound_;
    Prelude head;
    if (!read_prelude(bytes, &head) || !allowed_parcel(head, inbound->limits())) {
        inbound->refuse(bytes);
    }
    if (head.parcel_class != kind_) {
        refuse("frame field parcel_class is " + text(head.parcel_class) + "; allowed: " +
               text(kind_));
    }
    inbound->check_order(head);
    const auto transfer = inbound->admit(head, lease(head));
    uint8_t* columns;
    transfer->columns = new_bytes(head.column_bytes, &columns);
    std::memcpy(columns, theirs_->columns(kind_, head.lease - 1), head.column_bytes);
    ++taken_;
    inbound->arrived(*transfer);
}

// Own the slots that a frame names.
std::shared_ptr<Lease> ShmReceiver::lease(const Prelude& head) {
    const int64_t first = int64_t{head.lease} - 1;
    const int64_t count =
        std::max(theirs_->count(head.payload_bytes), theirs_->count(head.column_bytes));
    if (first < 0 || first > theirs_->slots - count) {
        refuse("frame field lease is " + text(head.lease) + "; allowed: 1 to " +
               text(theirs_->slots - count + 1) + " for " + text(count) + " slots");
    }
    for (int64_t slot = first; slot < first + count; ++slot) {
        if (held_[slot]) {
            refuse("frame field lease is " + text(head.lease) + ", which this rank holds");
        }
    }
    const uint32_t expected = *mine_->reclaimed(kind_, first) + 1;
    if (head.generation != expected) {
        refuse("frame field generation is " + text(head.generation) + "; allowed: " +
               text(expected) + " for slot " + text(first));
    }
    auto lease = leases_->lend(
        block(first), static_cast<int64_t>(head.payload_bytes),
        [self = shared_from_this(), first, count] { self->give_back(first, count); });
    std::fill_n(held_.begin() + first, count, 1);
    return lease;
}

const std::shared_ptr<Block>& ShmReceiver::block(int64_t first) {
    std::shared_ptr<Block>& found = blocks_[first];
    if (!found) {  // from that slot on, since a payload may take more than one
        const int64_t begin = first * theirs_->slot_bytes;
        found = leases_->block(memory_[py::slice(begin, theirs_->slots * theirs_->slot_bytes, 1)]);
    }
    return found;
}

// The last read is over. The peer may wait for a notice of that.
void ShmReceiver::give_back(int64_t first, int64_t count) {
    std::fill_n(held_.begin() + first, count, 0);
    fence();
    uint32_t* reclaimed = mine_->reclaimed(kind_, first);
    store(reclaimed, *reclaimed + 1);
    fence();
    const uint32_t waiting = load(theirs_->waiting(kind_));
    if (waiting == answered_) return;
    answered_ = waiting;
    if (inbound_) call(py::object(on_asked_));
}

void ShmReceiver::stop() {
    inbound_ = nullptr;
    memory_ = on_asked_ = py::none();
    blocks_.clear();
}

bool ShmBell::due() {
    fence();
    const uint32_t sleeps = load(theirs_->sleeps());
    if (sleeps == answered_) return false;
    answered_ = sleeps;
    return true;
}

void ShmBell::sleep() {
    store(mine_->sleeps(), *mine_->sleeps() + 1);
    fence();
}

void bind_shm_receiver(py::module_& m) {
    py::class_<ShmReceiver, std::shared_ptr<ShmReceiver>>(m, "ShmReceiver")
        .def(py::init<std::shared_ptr<Segment>, std::shared_ptr<Segment>, int,
                      std::shared_ptr<Inbound>, std::shared_ptr<Pool>, py::object, py::object>());
    py::class_<ShmBell, std::shared_ptr<ShmBell>>(m, "ShmBell")
        .def(py::init<std::shared_ptr<Segment>, std::shared_ptr<Segment>>());
}

}  // namespace columns
