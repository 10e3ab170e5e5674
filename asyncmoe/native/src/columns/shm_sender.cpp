#include "shm_sender.h"

#include <cstring>

#include <pybind11/stl.h>

namespace columns {
namespace {

constexpr uint64_t kCopyBytesPerTurn = 1 << 20;
constexpr size_t kLookBack = 16;  // slots taken first are the likeliest to be back

}  // namespace

py::object ShmSender::post(Outbound::Frame frame, bool at_once) {
    Outgoing outgoing{std::move(frame), {}, 0, -1, 0};
    const Payload& payload = outgoing.frame.payload;
    if (payload.data == nullptr && payload.size != 0) {
        throw py::value_error("a payload that is not contiguous host memory");
    }
    outgoing.count = std::max(mine_->count(payload.size),
                              mine_->count(outgoing.frame.head.column_bytes));
    const int64_t first = at_once && queue_.empty() ? find(outgoing.count) : -1;
    if (first >= 0 && payload.size <= kCopyBytesPerTurn) {  // as most do
        py::object posted = outbound_->number_free(&outgoing.frame);
        take(&outgoing, first);
        copy(&outgoing, payload.size);
        publish(outgoing);
        return posted;
    }
    py::object posted = outgoing.posted = outbound_->number(&outgoing.frame);
    if (first >= 0) take(&outgoing, first);
    queue_.push_back(std::move(outgoing));
    if (at_once && queue_.size() == 1) advance();
    return posted;
}

bool ShmSender::advance() {
    uint64_t left = kCopyBytesPerTurn;
    bool any = false;
    while (!queue_.empty() && left > 0) {
        Outgoing& head = queue_.front();
        if (head.first < 0) {
            int64_t first = find(head.count);
            if (first < 0) {  // ask for a notice, and look once more
                uint32_t* waiting = mine_->waiting(kind_);
                store(waiting, *waiting + 1);
                fence();
                first = find(head.count);
            }
            starved_ = first < 0;
            if (starved_) break;
            take(&head, first);
        }
        left -= copy(&head, left);
        if (head.done < head.frame.payload.size) break;
        const Outgoing whole = std::move(head);
        queue_.pop_front();
        publish(whole);
        any = true;
    }
    return any;
}

// The first of `count` adjacent free slots, or -1. The lowest there are: the least memory is
// touched, and what is touched was so a moment ago.
int64_t ShmSender::find(int64_t count) {
    take_back(kLookBack);
    int64_t first = lowest_run(count);
    if (first < 0) {
        take_back(out_.size());
        first = lowest_run(count);
    }
    return first;
}

int64_t ShmSender::lowest_run(int64_t count) const {
    int64_t run = 0;
    for (int64_t slot = 0; slot < mine_->slots; ++slot) {
        run = free_[slot] ? run + 1 : 0;
        if (run == count) return slot + 1 - count;
    }
    return -1;
}

// Own those slots again, of the `most` oldest, that the peer has given back.
void ShmSender::take_back(size_t most) {
    most = std::min(most, out_.size());
    size_t kept = 0;
    for (size_t i = 0; i < most; ++i) {
        const Out& out = out_[i];
        if (load(theirs_->reclaimed(kind_, out.first)) == out.generation) {
            std::fill_n(free_.begin() + out.first, out.count, 1);
        } else {
            out_[kept++] = out;
        }
    }
    out_.erase(out_.begin() + kept, out_.begin() + most);
}

void ShmSender::take(Outgoing* outgoing, int64_t first) {
    const uint32_t generation = ++generation_[first];
    std::fill_n(free_.begin() + first, outgoing->count, 0);
    out_.push_back({first, outgoing->count, generation});
    outgoing->first = first;
    outgoing->frame.head.lease = static_cast<uint32_t>(first + 1);
    outgoing->frame.head.generation = generation;
}

// Write up to `most` bytes of the payload; returns how many.
uint64_t ShmSender::copy(Outgoing* outgoing, uint64_t most) {
    const Payload& payload = outgoing->frame.payload;
    const uint64_t size = std::min(most, payload.size - outgoing->done);
    if (size != 0) {
        std::memcpy(mine_->payload(kind_, outgoing->first) + outgoing->done,
                    payload.data + outgoing->done, size);
    }
    outgoing->done += size;
    return size;
}

// The payload is whole: columns and prelude follow, and the peer may look.
void ShmSender::publish(const Outgoing& outgoing) {
    const Bytes columns(outgoing.frame.columns);
    std::memcpy(mine_->columns(kind_, outgoing.first), columns.data(), columns.size());
    write_prelude(outgoing.frame.head, mine_->entry(kind_, published_));
    store(mine_->published(kind_), ++published_);
    if (outgoing.posted) outbound_->sent(outgoing.posted);
}

void bind_shm_sender(py::module_& m) {
    py::class_<Segment, std::shared_ptr<Segment>>(m, "Segment")
        .def(py::init<const py::buffer&, int64_t, int64_t, int64_t, int64_t, int64_t>());
    py::class_<ShmSender, std::shared_ptr<ShmSender>>(m, "ShmSender")
        .def(py::init<std::shared_ptr<Segment>, std::shared_ptr<Segment>, int,
                      std::shared_ptr<Outbound>>())
        .def_property_readonly("waiting", &ShmSender::waiting)
        .def_property_readonly("generations", &ShmSender::generations);
}

}  // namespace columns
