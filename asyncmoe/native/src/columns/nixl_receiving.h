// What one peer writes to this rank over NIXL: the compiled twin of `Receiving` in
// transports/nixl_receiving.py.
#pragma once

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "inbound.h"
#include "nixl_note.h"

namespace columns {

constexpr int64_t kTellBytes = 256 << 10;  // of slots that are free again: the peer is told soon

class NixlReceiving : public std::enable_shared_from_this<NixlReceiving> {
  public:
    NixlReceiving(std::shared_ptr<Pool> leases, py::object memory, int64_t slots,
                  int64_t slot_bytes, uint32_t generation, py::object on_free)
        : leases_(std::move(leases)),
          memory_(std::move(memory)),
          slots_(slots),
          slot_bytes_(slot_bytes),
          generation_(generation),
          on_free_(std::move(on_free)) {
        for (Lane& lane : lanes_) {
            lane.held.assign(slots, 0);
            lane.generation.assign(slots, 0);
        }
    }

    // See the twin.
    void begin(std::shared_ptr<Inbound> inbound) { inbound_ = std::move(inbound); }
    std::shared_ptr<Lease> place(const Transfer& transfer);
    bool announced(std::shared_ptr<Transfer> transfer);
    void on_written(const py::bytes& note);
    py::object freed_note();
    size_t due() const { return lanes_[kDispatch].due.size() + lanes_[kCombine].due.size(); }
    int64_t held() const { return held_; }
    bool enough() const {
        return 4 * freed_slots_ >= slots_ || freed_slots_ * slot_bytes_ >= kTellBytes;
    }
    void stop();

  private:
    // A parcel that was announced: `left` bytes of its payload are not there.
    struct Due {
        std::shared_ptr<Transfer> transfer;
        uint64_t left;
    };
    // What is known of one class.
    struct Lane {
        std::vector<uint8_t> held;  // by slot
        std::vector<uint32_t> generation;
        std::unordered_map<int64_t, std::shared_ptr<Block>> blocks;  // by first slot
        std::unordered_map<uint64_t, Due> due;         // by sequence: announced, not whole
        std::unordered_map<uint64_t, uint64_t> early;  // bytes whose control frame is not here yet
        uint64_t next = 0;                             // sequence of the next control frame
    };

    const std::shared_ptr<Block>& block(int kind, int64_t first);
    void written(const Written& entry);
    bool complete(Lane* lane, uint64_t sequence, uint64_t nbytes);
    void give_back(int kind, int64_t first, int64_t count);

    const std::shared_ptr<Pool> leases_;
    py::object memory_;
    const int64_t slots_, slot_bytes_;
    const uint32_t generation_;
    py::object on_free_;
    std::shared_ptr<Inbound> inbound_;  // null: not begun, or stopped
    Lane lanes_[kClasses];              // by class; the first is not used
    std::vector<Freed> freed_;          // what the peer has to be told of
    int64_t freed_slots_ = 0;
    int64_t held_ = 0;  // payloads
    bool stopped_ = false;
};

void bind_nixl_receiving(py::module_& m);

}  // namespace columns
