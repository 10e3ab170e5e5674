// Frames onto a non-blocking stream socket: the compiled twin of asyncmoe/writer.py.
#pragma once

#include <deque>
#include <memory>

#include "outbound.h"

namespace columns {

class Writer : public std::enable_shared_from_this<Writer> {
  public:
    Writer(int fd, py::object on_full, py::object on_fault);
    Writer(const Writer&) = delete;
    Writer& operator=(const Writer&) = delete;
    ~Writer() { stop(); }

    // See the twin.
    void send(py::handle buffers, py::object on_sent);
    py::object post(std::shared_ptr<Outbound> outbound, py::handle parcel);
    // The same for who asks no more about it.
    void send_parcel(Outbound* outbound, const PackedView& parcel);

    // What `poster` gives, as compiled code calls it.
    struct Poster {
        py::object operator()(PyObject* const* arguments) const;
        void post(const PackedView& parcel) const;

        std::shared_ptr<Writer> writer;
        std::shared_ptr<Outbound> outbound;
        py::object link;

      private:
        void check() const;
    };
    py::object poster(std::shared_ptr<Outbound> outbound, py::object link);
    py::object repeater(py::bytes frame);
    bool write(int most);
    void stop();
    bool idle() const { return pieces_.empty(); }
    uint64_t sent() const { return sent_; }

  private:
    struct Piece {
        enum { kView, kOwned, kPrelude } what;
        union {
            Py_buffer view;
            PyObject* owner;
            uint8_t prelude[kPreludeBytes];
        };
        const uint8_t* data;
        size_t size;
    };
    // What is called once the kernel has all bytes up to `end`.
    struct Mark {
        uint64_t end;
        py::object on_sent;  // or `Posted`, of `outbound`
        std::shared_ptr<Outbound> outbound;
    };

    void add(py::handle buffer);
    void add(const py::object& owner, const uint8_t* data, size_t size);
    void add(const Outbound::Frame& frame);
    void drop_front();
    void begin(bool was_idle);
    py::ssize_t give();
    void taken(size_t count);

    int fd_;  // -1: stopped
    py::object on_full_, on_fault_;
    std::deque<Piece> pieces_;
    std::deque<Mark> marks_;
    uint64_t queued_ = 0, sent_ = 0;  // bytes, ever
    size_t offered_ = 0;              // to the kernel, the last time
};

void bind_writer(py::module_& m);

}  // namespace columns
