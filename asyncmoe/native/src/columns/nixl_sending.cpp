#include "nixl_sending.h"

namespace columns {

int64_t NixlSlots::find(int64_t count) const {
    int64_t run = 0;
    const auto slots = static_cast<int64_t>(free_.size());
    for (int64_t slot = 0; slot < slots; ++slot) {
        run = free_[slot] ? run + 1 : 0;
        if (run == count) return slot + 1 - count;
    }
    return -1;
}

uint32_t NixlSlots::take(int64_t first, int64_t count) {
    std::fill_n(free_.begin() + first, count, 0);
    out_[first] = count;
    ++payloads_;
    return ++generation_[first];
}

void NixlSlots::give_back(uint32_t first, uint32_t generation) {
    const bool is_out = first < out_.size() && out_[first] != 0;
    if (!is_out || generation != generation_[first]) {
        refuse_protocol("slot " + std::to_string(first) + " comes back with generation " +
                        std::to_string(generation) + "; allowed: " +
                        (is_out ? std::to_string(generation_[first]) : "None"));
    }
    std::fill_n(free_.begin() + first, out_[first], 1);
    out_[first] = 0;
    --payloads_;
}

py::object NixlSending::post(py::handle parcel) {
    auto outgoing = std::make_shared<NixlOutgoing>();
    outgoing->frame = outbound_->frame(parcel);
    const Payload& payload = outgoing->frame.payload;
    if (payload.data == nullptr && payload.size != 0) {
        throw py::value_error("a payload that is not contiguous host memory");
    }
    py::object posted = outgoing->posted = outbound_->number(&outgoing->frame);
    outgoing->first = -1;
    outgoing->unwritten = payload.size;
    Lane& lane = this->lane(outgoing->frame.head.parcel_class);
    if (payload.size != 0 && (lane.starved != 0 || !find_slots(&lane, outgoing.get()))) {
        ++lane.starved;
    }
    lane.queue.push_back(std::move(outgoing));
    return posted;
}

bool NixlSending::find_slots(Lane* lane, NixlOutgoing* outgoing) {
    const int64_t needed = count(outgoing->frame.payload.size);
    const int64_t first = lane->slots.find(needed);
    if (first < 0) return false;
    outgoing->first = first;
    outgoing->frame.head.lease = static_cast<uint32_t>(first + 1);
    outgoing->frame.head.generation = lane->slots.take(first, needed);
    return true;
}

std::shared_ptr<NixlBatch> NixlSending::next_batch() {
    auto batch = std::make_shared<NixlBatch>();
    for (Lane& lane : lanes_) load(&lane, batch.get());
    if (batch->touched.empty()) return nullptr;
    batch->note = encode_note<Written>(generation_, batch->entries);
    return batch;
}

void NixlSending::load(Lane* lane, NixlBatch* batch) {
    while (!lane->queue.empty()) {
        const std::shared_ptr<NixlOutgoing> head = lane->queue.front();
        const uint64_t nbytes = head->frame.payload.size;
        uint64_t size = 0;
        if (nbytes != 0) {
            const bool small = nbytes <= batch_bytes_;
            const bool fits = small ? batch->nbytes + nbytes <= batch_bytes_
                                    : batch->entries.empty();
            if (!fits) return;  // it goes in the next
            if (head->first < 0) {
                if (!find_slots(lane, head.get())) return;  // for those that come back
                --lane->starved;
            }
            size = std::min(small ? nbytes : write_bytes_, nbytes - head->begun);
            add_piece(*lane, *head, size, batch);
        }
        batch->touched.emplace_back(head, size);
        head->begun += size;
        if (head->begun == nbytes) {
            lane->queue.pop_front();
            batch->frames.append(encoded(head->frame));
        }
    }
}

void NixlSending::add_piece(const Lane& lane, const NixlOutgoing& head, uint64_t size,
                            NixlBatch* batch) {
    const Payload& payload = head.frame.payload;
    const uint64_t source = reinterpret_cast<uintptr_t>(payload.data) + head.begun;
    const uint64_t target =
        lane.address + static_cast<uint64_t>(head.first * slot_bytes_) + head.begun;
    batch->payloads.append(payload.owner);
    batch->local.append(py::make_tuple(source, size, host_device_));
    batch->remote.append(py::make_tuple(target, size, 0));
    batch->nbytes += size;
    batch->entries.push_back(
        {lane.kind, static_cast<uint32_t>(size), head.frame.head.sequence});
}

void NixlSending::written_out(const std::shared_ptr<NixlBatch>& batch) {
    for (const auto& [outgoing, nbytes] : batch->touched) {
        outgoing->unwritten -= nbytes;
        if (outgoing->unwritten == 0) outbound_->sent(outgoing->posted);
    }
}

void NixlSending::on_freed(const py::bytes& note) {
    each_entry<Freed>(note, [&](const Freed& entry) {
        lane(entry.kind).slots.give_back(entry.first, entry.generation);
    });
}

bool NixlSending::waits() const { return !lanes_[0].queue.empty() || !lanes_[1].queue.empty(); }

int64_t NixlSending::out() const {
    return lanes_[0].slots.payloads() + lanes_[1].slots.payloads();
}

void NixlSending::clear() {
    for (Lane& lane : lanes_) {
        lane.queue.clear();
        lane.starved = 0;
    }
}

void bind_nixl_sending(py::module_& m) {
    py::class_<NixlBatch, std::shared_ptr<NixlBatch>>(m, "NixlBatch")
        .def_readonly("payloads", &NixlBatch::payloads)
        .def_readonly("local", &NixlBatch::local)
        .def_readonly("remote", &NixlBatch::remote)
        .def_readonly("frames", &NixlBatch::frames)
        .def_readonly("note", &NixlBatch::note)
        .def_readonly("nbytes", &NixlBatch::nbytes);
    py::class_<NixlSending>(m, "NixlSending")
        .def(py::init<std::shared_ptr<Outbound>, int64_t, int64_t, uint64_t, uint32_t, int, uint64_t,
                      uint64_t>())
        .def("post", &NixlSending::post)
        .def("next_batch", &NixlSending::next_batch)
        .def("written_out", &NixlSending::written_out)
        .def("on_freed", &NixlSending::on_freed)
        .def("clear", &NixlSending::clear)
        .def_property_readonly("waits", &NixlSending::waits)
        .def_property_readonly("out", &NixlSending::out);
}

}  // namespace columns
