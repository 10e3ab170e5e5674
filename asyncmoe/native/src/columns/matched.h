// Both directions of one peer on a stack of matched transfers: the compiled twins of `Sending` and
// `Receiving` in transports/matched_flow.py.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "inbound.h"
#include "outbound.h"

namespace columns {

// How much of a class is announced in one direction and not taken. One parcel always fits.
class MatchedWindow {
  public:
    MatchedWindow(size_t most_parcels, uint64_t most_bytes)
        : most_parcels_(most_parcels), most_bytes_(most_bytes) {}

    // Announce one more; false, and nothing done, if it is too much.
    bool put(uint64_t nbytes) {
        const bool fits = sizes_.size() < most_parcels_ && nbytes_ + nbytes <= most_bytes_;
        if (!sizes_.empty() && !fits) return false;
        sizes_.push_back(nbytes);
        nbytes_ += nbytes;
        return true;
    }
    // The first so many were taken.
    void take(size_t count) {
        for (; count != 0; --count) {
            nbytes_ -= sizes_.front();
            sizes_.pop_front();
        }
    }
    size_t parcels() const { return sizes_.size(); }
    uint64_t nbytes() const { return nbytes_; }
    size_t most_parcels() const { return most_parcels_; }
    uint64_t most_bytes() const { return most_bytes_; }

  private:
    const size_t most_parcels_;
    const uint64_t most_bytes_;
    std::deque<uint64_t> sizes_;
    uint64_t nbytes_ = 0;
};

class MatchedSending {
  public:
    MatchedSending(std::shared_ptr<Outbound> outbound, py::object notice, py::object on_ready,
                   size_t most_parcels, uint64_t most_bytes, uint64_t burst_bytes);

    // See the twin.
    py::object post(py::handle parcel);
    int64_t taken(int kind, size_t count);
    py::tuple leave();
    bool idle() const;
    void stop();

  private:
    struct Outgoing {
        py::bytes frame;
        py::object payload, posted;
        uint64_t size, nbytes;
    };
    struct Lane {
        MatchedWindow window;
        std::deque<Outgoing> held, out;  // not announced, and announced but not taken
    };

    void announce(Lane* lane, Outgoing outgoing);
    void end_burst();

    const std::shared_ptr<Outbound> outbound_;
    const py::object notice_;
    py::object on_ready_;
    const uint64_t burst_bytes_;
    std::vector<Lane> lanes_;  // by class; the first is not used
    py::list frames_, bursts_, payloads_, posted_;
    uint64_t gathered_ = 0;  // bytes of `payloads_`
};

class MatchedReceiving {
  public:
    MatchedReceiving(py::object on_ready, py::object on_whole, size_t most_parcels,
                     uint64_t most_bytes);

    // See the twin.
    void begin(std::shared_ptr<Inbound> inbound) { inbound_ = std::move(inbound); }
    void place(const Transfer& transfer);
    void announced(std::shared_ptr<Transfer> transfer);
    py::list take();
    void arrived(const py::list& transfers);
    py::list told();
    void stop();

  private:
    struct Lane {
        MatchedWindow window;
        std::deque<std::shared_ptr<Transfer>> coming;  // not whole, or behind one that is not
        size_t early = 0;                              // of those, how many are whole
        size_t whole = 0;                              // with all before, and the peer was not told
    };

    void arrived_one(const std::shared_ptr<Transfer>& transfer);

    py::object on_ready_, on_whole_;
    std::shared_ptr<Inbound> inbound_;  // null: not begun, or stopped
    std::vector<Lane> lanes_;           // by class; the first is not used
    py::list waiting_;
    bool telling_ = false;
};

void bind_matched(py::module_& m);

}  // namespace columns
