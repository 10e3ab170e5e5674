// What one peer sends to this rank in one class through shared memory: the compiled twin of
// `Receiver` in transports/shm_lanes.py; and of `Bell`.
#pragma once

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "inbound.h"
#include "shm_segment.h"

namespace columns {

class ShmReceiver : public std::enable_shared_from_this<ShmReceiver> {
  public:
    ShmReceiver(std::shared_ptr<Segment> mine, std::shared_ptr<Segment> theirs, int kind,
                std::shared_ptr<Inbound> inbound, std::shared_ptr<Pool> leases, py::object memory,
                py::object on_asked)
        : mine_(std::move(mine)),
          theirs_(std::move(theirs)),
          kind_(kind),
          inbound_(std::move(inbound)),
          leases_(std::move(leases)),
          memory_(std::move(memory)),
          on_asked_(std::move(on_asked)),
          held_(theirs_->slots, 0) {}

    // See the twin.
    bool take(int most);
    bool pending() const { return inbound_ && load(theirs_->published(kind_)) != taken_; }
    void stop();

  private:
    void take_next(uint32_t published);
    std::shared_ptr<Lease> lease(const Prelude& head);
    const std::shared_ptr<Block>& block(int64_t first);
    void give_back(int64_t first, int64_t count);

    const std::shared_ptr<Segment> mine_, theirs_;
    const int kind_;
    std::shared_ptr<Inbound> inbound_;  // null: stopped
    const std::shared_ptr<Pool> leases_;
    py::object memory_, on_asked_;
    std::vector<uint8_t> held_;  // by slot
    std::unordered_map<int64_t, std::shared_ptr<Block>> blocks_;  // by first slot
    uint32_t taken_ = 0, answered_ = 0;
};

class ShmBell {
  public:
    ShmBell(std::shared_ptr<Segment> mine, std::shared_ptr<Segment> theirs)
        : mine_(std::move(mine)), theirs_(std::move(theirs)) {}

    bool due();
    void sleep();

  private:
    const std::shared_ptr<Segment> mine_, theirs_;
    uint32_t answered_ = 0;
};

void bind_shm_receiver(py::module_& m);

}  // namespace columns
