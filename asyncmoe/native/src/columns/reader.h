// Frames off a non-blocking stream socket: the compiled twin of asyncmoe/reader.py.
#pragma once

#include <sys/uio.h>

#include <memory>
#include <vector>

#include "inbound.h"

namespace columns {

class Reader : public std::enable_shared_from_this<Reader> {
  public:
    Reader(int fd, std::shared_ptr<Inbound> inbound, bool whole, py::object on_parcel,
           py::object on_signal);

    // See the twin: 1 if there may be more, 0 if not for now, -1 at the end.
    int read();
    void stop();
    py::object on_readable(py::object on_read, py::object on_trouble);
    uint64_t reads() const { return reads_; }

  private:
    struct Part {
        uint8_t* at;
        size_t left;
    };

    py::ssize_t receive();
    void fill_from_stage();
    void take(size_t got);
    void begin(const uint8_t* head);
    void finish();

    int fd_;  // -1: stopped
    uint64_t reads_ = 0;
    const std::shared_ptr<Inbound> inbound_;
    const bool whole_;
    py::object on_parcel_, on_signal_;  // until it is stopped

    // Where the bytes go that follow the prelude of the frame that is read, then the stage, for
    // what comes behind them.
    Part parts_[2] = {};
    bool within_ = false;                 // a frame, whose prelude is read
    std::shared_ptr<Transfer> transfer_;  // of it, if it is a parcel
    py::object message_;                  // of it, if it is a message
    std::vector<uint8_t> stage_;
    size_t first_ = 0, last_ = 0;  // of the stage: bytes that nobody has looked at
    size_t ahead_;                 // how far the stage is used
};

void bind_reader(py::module_& m);

}  // namespace columns
