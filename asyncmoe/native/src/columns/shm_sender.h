// What this rank sends to one peer in one class through shared memory: the compiled twin of
// `Sender` in transports/shm_lanes.py, where the order of accesses is argued.
#pragma once

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "outbound.h"
#include "shm_segment.h"

namespace columns {

class ShmSender {
  public:
    ShmSender(std::shared_ptr<Segment> mine, std::shared_ptr<Segment> theirs, int kind,
              std::shared_ptr<Outbound> outbound)
        : mine_(std::move(mine)),
          theirs_(std::move(theirs)),
          kind_(kind),
          outbound_(std::move(outbound)),
          free_(mine_->slots, 1),
          generation_(mine_->slots, 0) {}

    // See the twin.
    py::object post(Outbound::Frame frame, bool at_once);
    bool advance();
    void clear() { queue_.clear(); }
    size_t waiting() const { return queue_.size(); }
    bool may_advance() const { return !queue_.empty() && !starved_; }
    const std::vector<uint32_t>& generations() const { return generation_; }

  private:
    struct Outgoing {
        Outbound::Frame frame;
        py::object posted;  // null: free already
        int64_t count;  // slots that it takes
        int64_t first;  // of them; -1: not found
        uint64_t done;  // bytes of the payload that are there
    };
    // Slots that are with the peer.
    struct Out {
        int64_t first, count;
        uint32_t generation;
    };

    int64_t find(int64_t count);
    int64_t lowest_run(int64_t count) const;
    void take_back(size_t most);
    void take(Outgoing* outgoing, int64_t first);
    uint64_t copy(Outgoing* outgoing, uint64_t most);
    void publish(const Outgoing& outgoing);

    const std::shared_ptr<Segment> mine_, theirs_;
    const int kind_;
    const std::shared_ptr<Outbound> outbound_;
    std::vector<uint8_t> free_;  // by slot
    std::vector<uint32_t> generation_;
    std::vector<Out> out_;  // the oldest first
    std::deque<Outgoing> queue_;
    bool starved_ = false;  // the first of them found no slots
    uint32_t published_ = 0;
};

void bind_shm_sender(py::module_& m);

}  // namespace columns
