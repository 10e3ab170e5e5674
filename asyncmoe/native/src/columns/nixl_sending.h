// What this rank writes to one peer over NIXL: the compiled twin of `Sending` in
// transports/nixl_sending.py.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "nixl_note.h"
#include "outbound.h"

namespace columns {

// The slots of one class that this rank fills for one peer.
class NixlSlots {
  public:
    explicit NixlSlots(int64_t slots) : free_(slots, 1), generation_(slots, 0), out_(slots, 0) {}

    // The first of `count` adjacent free slots, or -1. The lowest, which are in the caches.
    int64_t find(int64_t count) const;
    // Own them for one payload; returns its generation.
    uint32_t take(int64_t first, int64_t count);
    // The peer has read a payload for the last time. Raises ProtocolError: not that one.
    void give_back(uint32_t first, uint32_t generation);
    int64_t payloads() const { return payloads_; }

  private:
    std::vector<uint8_t> free_;  // by slot, as all of these
    std::vector<uint32_t> generation_;
    std::vector<int64_t> out_;  // slots of the payload that begins there; 0: none does
    int64_t payloads_ = 0;      // that are out
};

// A parcel that is not whole at the peer.
struct NixlOutgoing {
    Outbound::Frame frame;
    py::object posted;
    int64_t first;       // of its slots, or -1: it has none yet
    uint64_t begun;      // bytes that the library has
    uint64_t unwritten;  // bytes whose source is not free
};

// What is written together.
struct NixlBatch {
    // As the library takes them: uint64 [pieces, 3] of address, bytes and device.
    py::array local() const { return places(locals); }
    py::array remote() const { return places(remotes); }

    using Place = std::array<uint64_t, 3>;
    static py::array places(const std::vector<Place>& from);

    py::list payloads, frames;
    py::bytes note;
    uint64_t nbytes = 0;
    std::vector<Place> locals, remotes;
    std::vector<std::pair<std::shared_ptr<NixlOutgoing>, uint64_t>> touched;
    std::vector<Written> entries;
};

class NixlSending : public std::enable_shared_from_this<NixlSending> {
  public:
    NixlSending(std::shared_ptr<Outbound> outbound, int64_t slots, int64_t slot_bytes,
                uint64_t address, uint32_t generation, uint64_t host_device, uint64_t batch_bytes,
                uint64_t write_bytes)
        : outbound_(std::move(outbound)),
          slot_bytes_(slot_bytes),
          generation_(generation),
          host_device_(host_device),
          batch_bytes_(batch_bytes),
          write_bytes_(write_bytes),
          lanes_{{kCombine, address + static_cast<uint64_t>(slots * slot_bytes), slots},
                 {kDispatch, address, slots}} {}

    // See the twin.
    py::object post(py::handle parcel);
    // A function that posts a parcel unless `link` is lost, and calls `ready()` where nobody knows
    // yet that there is something to write.
    py::object poster(py::object link, py::object ready);
    std::shared_ptr<NixlBatch> next_batch();
    void written_out(const std::shared_ptr<NixlBatch>& batch);
    void on_freed(const py::bytes& note);
    bool waits() const;
    int64_t out() const;
    void clear();

  private:
    struct Lane {
        Lane(uint8_t kind, uint64_t address, int64_t slots)
            : kind(kind), address(address), slots(slots) {}

        const uint8_t kind;
        const uint64_t address;
        NixlSlots slots;
        std::deque<std::shared_ptr<NixlOutgoing>> queue;  // not all of them is with the library
    };

    Lane& lane(uint8_t kind) { return lanes_[kind == kCombine ? 0 : 1]; }
    int64_t count(uint64_t nbytes) const {
        return std::max<int64_t>(1, (static_cast<int64_t>(nbytes) + slot_bytes_ - 1) / slot_bytes_);
    }
    bool find_slots(Lane* lane, NixlOutgoing* outgoing);
    void load(Lane* lane, NixlBatch* batch);
    void add_piece(const Lane& lane, const NixlOutgoing& head, uint64_t size, NixlBatch* batch);

    const std::shared_ptr<Outbound> outbound_;
    const int64_t slot_bytes_;
    const uint32_t generation_;
    const uint64_t host_device_, batch_bytes_, write_bytes_;
    Lane lanes_[2];       // the first goes first
    bool known_ = false;  // that there may be something: `next_batch` is due
};

void bind_nixl_sending(py::module_& m);

}  // namespace columns
