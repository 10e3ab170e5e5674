#include "nixl_receiving.h"

#include <algorithm>

namespace columns {
namespace {

std::string text(uint64_t number) { return std::to_string(number); }

}  // namespace

// Own the slots that a frame names. One without a payload needs none.
std::shared_ptr<Lease> NixlReceiving::place(const Transfer& transfer) {
    const Prelude& head = transfer.head;
    if (head.payload_bytes == 0) return nullptr;
    Lane& lane = lanes_[head.parcel_class];
    const int kind = head.parcel_class;
    const auto nbytes = static_cast<int64_t>(head.payload_bytes);
    const int64_t first = int64_t{head.lease} - 1, count = (nbytes + slot_bytes_ - 1) / slot_bytes_;
    if (first < 0 || first > slots_ - count) {
        refuse_protocol("frame field lease is " + text(head.lease) + "; allowed: 1 to " +
                        std::to_string(slots_ - count + 1) + " for " + std::to_string(count) +
                        " slots");
    }
    const auto begin = lane.held.begin() + first;
    if (std::any_of(begin, begin + count, [](uint8_t held) { return held != 0; })) {
        refuse_protocol("frame field lease is " + text(head.lease) + ", which this rank holds");
    }
    const uint32_t expected = lane.generation[first] + 1;
    if (head.generation != expected) {
        refuse_protocol("frame field generation is " + text(head.generation) + "; allowed: " +
                        text(expected));
    }
    auto lease = leases_->lend(block(kind, first), nbytes, [self = shared_from_this(), kind, first,
                                                            count] {
        self->give_back(kind, first, count);
    });
    lane.generation[first] = expected;
    std::fill_n(begin, count, 1);
    ++held_;
    return lease;
}

const std::shared_ptr<Block>& NixlReceiving::block(int kind, int64_t first) {
    std::shared_ptr<Block>& found = lanes_[kind].blocks[first];
    if (!found) {  // from that slot on, since a payload may take more than one
        const int64_t class_bytes = slots_ * slot_bytes_;
        const int64_t begin = (kind - 1) * class_bytes + first * slot_bytes_;
        found = leases_->block(memory_[py::slice(begin, kind * class_bytes, 1)]);
    }
    return found;
}

bool NixlReceiving::announced(std::shared_ptr<Transfer> transfer) {
    if (stopped_) return true;
    const Prelude head = transfer->head;
    Lane& lane = lanes_[head.parcel_class];
    lane.next = head.sequence + 1;
    uint64_t early = 0;
    const auto found = lane.early.find(head.sequence);
    if (found != lane.early.end()) {
        early = found->second;
        lane.early.erase(found);
    }
    if (head.payload_bytes == 0) {
        inbound_->arrived(*transfer);
        return true;
    }
    lane.due[head.sequence] = Due{std::move(transfer), head.payload_bytes};
    return complete(&lane, head.sequence, early);
}

void NixlReceiving::on_written(const py::bytes& note) {
    each_entry<Written>(note, [&](const Written& entry) {
        if (!stopped_) written(entry);
    });
}

void NixlReceiving::written(const Written& entry) {
    Lane& lane = lanes_[entry.kind];
    if (lane.due.count(entry.sequence) != 0) {
        complete(&lane, entry.sequence, entry.nbytes);
        return;
    }
    if (entry.sequence < lane.next || entry.sequence - lane.next >= static_cast<uint64_t>(slots_)) {
        refuse_protocol("notification sequence is " + text(entry.sequence) + "; allowed: " +
                        text(lane.next) + " and the next " + std::to_string(slots_) +
                        ", or one that is under way");
    }
    lane.early[entry.sequence] += entry.nbytes;
}

// More of a payload has come: hand the parcel over if that was all, and say so.
bool NixlReceiving::complete(Lane* lane, uint64_t sequence, uint64_t nbytes) {
    Due& due = lane->due[sequence];
    if (nbytes > due.left) {
        const uint64_t size = due.transfer->head.payload_bytes;
        refuse_protocol("notifications of " + text(size - due.left + nbytes) +
                        " bytes for a payload of " + text(size));
    }
    due.left -= nbytes;
    if (due.left != 0) return false;
    const std::shared_ptr<Transfer> transfer = std::move(due.transfer);
    lane->due.erase(sequence);
    const std::shared_ptr<Inbound> inbound = inbound_;
    inbound->arrived(*transfer);
    return true;
}

// The last read is over.
void NixlReceiving::give_back(int kind, int64_t first, int64_t count) {
    std::fill_n(lanes_[kind].held.begin() + first, count, 0);
    --held_;
    if (stopped_) {
        if (held_ != 0) return;
        const py::object on_free = std::move(on_free_);
        call(on_free);
        return;
    }
    freed_.push_back({static_cast<uint8_t>(kind), static_cast<uint32_t>(first),
                      lanes_[kind].generation[first]});
    freed_slots_ += count;
    if (freed_.size() == 1 || enough()) call(on_free_);
}

py::object NixlReceiving::freed_note() {
    if (freed_.empty()) return py::none();
    const py::bytes note = encode_note<Freed>(generation_, freed_);
    freed_.clear();
    freed_slots_ = 0;
    return note;
}

void NixlReceiving::stop() {
    if (stopped_) return;
    stopped_ = true;
    inbound_.reset();
    memory_ = py::none();
    for (Lane& lane : lanes_) {
        lane.due.clear();
        lane.early.clear();
        lane.blocks.clear();
    }
    if (held_ == 0) on_free_ = py::none();  // else the last who reads calls it
}

void bind_nixl_receiving(py::module_& m) {
    py::class_<NixlReceiving, std::shared_ptr<NixlReceiving>>(m, "NixlReceiving")
        .def(py::init<std::shared_ptr<Pool>, py::object, int64_t, int64_t, uint32_t, py::object>())
        .def("begin", &NixlReceiving::begin)
        .def("place", &NixlReceiving::place)
        .def("announced", &NixlReceiving::announced)
        .def("on_written", &NixlReceiving::on_written)
        .def("freed_note", &NixlReceiving::freed_note)
        .def("stop", &NixlReceiving::stop)
        .def_property_readonly("due", &NixlReceiving::due)
        .def_property_readonly("held", &NixlReceiving::held)
        .def_property_readonly("enough", &NixlReceiving::enough);
}

}  // namespace columns
