#include "nixl_sending.h"

#include "function.h"

namespace columns {

py::array NixlBatch::places(const std::vector<Place>& from) {
    const Fresh<uint64_t> fresh(static_cast<py::ssize_t>(from.size()), 3);
    if (!from.empty()) std::memcpy(fresh.data, from.data(), from.size() * sizeof(Place));
    return fresh.array;
}

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
    lane(outgoing->frame.head.parcel_class).queue.push_back(std::move(outgoing));
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

py::object NixlSending::poster(py::object link, py::object ready) {
    return function<1>([sending = shared_from_this(), link = std::move(link),
                        ready = std::move(ready)](PyObject* const* arguments) {
        static PyObject* const error = PyUnicode_InternFromString("error");
        if (!get(link, error).is_none()) link.attr("check")();
        py::object posted = sending->post(arguments[0]);
        if (!sending->known_) {
            sending->known_ = true;
            call(ready);
        }
        return posted;
    });
}

std::shared_ptr<NixlBatch> NixlSending::next_batch() {
    known_ = false;
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
            // Not before now: the fewer slots are out, the more of them are in the caches.
            if (head->first < 0 && !find_slots(lane, head.get())) return;
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
    batch->locals.push_back({source, size, host_device_});
    batch->remotes.push_back({target, size, 0});
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
    for (Lane& lane : lanes_) lane.queue.clear();
}

void bind_nixl_sending(py::module_& m) {
    py::class_<NixlBatch, std::shared_ptr<NixlBatch>>(m, "NixlBatch")
        .def_readonly("payloads", &NixlBatch::payloads)
        .def_property_readonly("local", &NixlBatch::local)
        .def_property_readonly("remote", &NixlBatch::remote)
        .def_readonly("frames", &NixlBatch::frames)
        .def_readonly("note", &NixlBatch::note)
        .def_readonly("nbytes", &NixlBatch::nbytes);
    py::class_<NixlSending, std::shared_ptr<NixlSending>>(m, "NixlSending")
        .def(py::init<std::shared_ptr<Outbound>, int64_t, int64_t, uint64_t, uint32_t, uint64_t,
                      uint64_t, uint64_t>())
        .def("post", &NixlSending::post)
        .def("poster", &NixlSending::poster)
        .def("next_batch", &NixlSending::next_batch)
        .def("written_out", &NixlSending::written_out)
        .def("on_freed", &NixlSending::on_freed)
        .def("clear", &NixlSending::clear)
        .def_property_readonly("waits", &NixlSending::waits)
        .def_property_readonly("out", &NixlSending::out);
}

}  // namespace columns
