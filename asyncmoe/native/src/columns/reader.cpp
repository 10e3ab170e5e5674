#include "reader.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "function.h"

namespace columns {
namespace {

constexpr int kCallsPerRead = 16;
constexpr py::ssize_t kBytesPerRead = 4 << 20;
constexpr size_t kStageBytes = 64 << 10;
constexpr size_t kShortestAhead = 1 << 10;
// Beyond this the copy takes long enough for others to want the interpreter meanwhile; below it,
// giving the lock up and waiting for it again costs more than the call.
constexpr size_t kLongBytes = 256 << 10;

}  // namespace

Reader::Reader(int fd, std::shared_ptr<Inbound> inbound, bool whole, py::object on_parcel,
               py::object on_signal)
    : fd_(fd),
      inbound_(std::move(inbound)),
      whole_(whole),
      on_parcel_(std::move(on_parcel)),
      on_signal_(std::move(on_signal)),
      stage_(kStageBytes),
      ahead_(whole ? kShortestAhead : kStageBytes) {}

void Reader::stop() {
    fd_ = -1;
    on_parcel_ = on_signal_ = py::none();
}

py::object Reader::on_readable(py::object on_read, py::object on_trouble) {
    return function<0>([reader = shared_from_this(), on_read = std::move(on_read),
                        on_trouble = std::move(on_trouble)](PyObject* const*) -> py::object {
        try {
            const int more = reader->read();
            return more == 0 ? py::none() : call(on_read, py::int_(more));
        } catch (py::error_already_set& error) {
            if (!error.matches(PyExc_Exception)) throw;
            const py::object value = error.value();
            return call(on_trouble, value);
        }
    });
}

int Reader::read() {
    ++reads_;
    py::ssize_t budget = kBytesPerRead;
    for (int call = 0; call < kCallsPerRead && budget > 0; ++call) {
        if (fd_ < 0) return 0;
        const py::ssize_t got = receive();
        if (got < 0) return 0;
        if (got == 0) return -1;
        budget -= got;
        take(static_cast<size_t>(got));
    }
    return fd_ < 0 ? 0 : 1;
}

// As many bytes as there are, to where they belong; -1 if there are none. Raises OSError.
py::ssize_t Reader::receive() {
    iovec to[3];
    size_t count = 0, wanted = 0;
    for (const Part& part : parts_) {
        if (part.left != 0) to[count++] = {part.at, part.left};
        wanted += part.left;
    }
    to[count++] = {stage_.data() + last_, ahead_ - last_};
    msghdr message{};
    message.msg_iov = to;
    message.msg_iovlen = count;
    py::ssize_t got;
    if (wanted > kLongBytes) {
        const py::gil_scoped_release others_may_run;
        got = ::recvmsg(fd_, &message, MSG_DONTWAIT);
    } else {
        got = ::recvmsg(fd_, &message, MSG_DONTWAIT);
    }
    if (got >= 0) return got;
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return -1;
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
}

// Account for bytes that were received, and hand over all that is whole.
void Reader::take(size_t got) {
    for (Part& part : parts_) {
        const size_t here = std::min(part.left, got);
        part.at += here;
        part.left -= here;
        got -= here;
    }
    last_ += got;
    while (fd_ >= 0) {
        if (within_) {
            fill_from_stage();
            if (parts_[0].left != 0 || parts_[1].left != 0) break;
            within_ = false;
            finish();
        } else if (last_ - first_ >= kPreludeBytes) {
            const uint8_t* head = stage_.data() + first_;
            first_ += kPreludeBytes;
            begin(head);
        } else {
            break;
        }
    }
    std::memmove(stage_.data(), stage_.data() + first_, last_ - first_);
    last_ -= first_;
    first_ = 0;
}

void Reader::fill_from_stage() {
    for (Part& part : parts_) {
        const size_t here = std::min(part.left, last_ - first_);
        if (here == 0) continue;
        std::memcpy(part.at, stage_.data() + first_, here);
        part.at += here;
        part.left -= here;
        first_ += here;
    }
}

// A prelude is whole: find out where its frame goes.
void Reader::begin(const uint8_t* head) {
    Prelude p;
    if (!read_prelude(head, &p)) inbound_->refuse(head);
    if (p.kind == kParcel) {
        if (!allowed_parcel(p, inbound_->limits())) inbound_->refuse(head);
        transfer_ = inbound_->accept(p);
        uint8_t* columns;
        transfer_->columns = new_bytes(p.column_bytes, &columns);
        parts_[0] = {columns, p.column_bytes};
        if (whole_) {
            parts_[1] = {transfer_->lease->block().data, p.payload_bytes};
            // So far that the next columns come with their prelude, and no payload if they are as
            // long as these.
            ahead_ = std::clamp(kPreludeBytes + size_t{p.column_bytes}, kShortestAhead,
                                kStageBytes);
        }
        within_ = true;
        return;
    }
    if (!allowed_control(p, inbound_->limits())) inbound_->refuse(head);
    if (p.kind == kMessage) {
        inbound_->accept_message(p);
        uint8_t* text;
        message_ = new_bytes(static_cast<py::ssize_t>(p.payload_bytes), &text);
        parts_[0] = {text, p.payload_bytes};
        within_ = true;
    } else if (p.kind != kHeartbeat) {
        const py::object on_signal = on_signal_;
        call(on_signal, py::int_(p.kind), py::int_(p.parcel_class), py::int_(p.rows));
    }
}

// The frame is whole.
void Reader::finish() {
    if (message_) {
        const auto message = py::reinterpret_steal<py::bytes>(message_.release());
        inbound_->deliver_message(message);
        return;
    }
    const std::shared_ptr<Transfer> transfer = std::move(transfer_);
    if (whole_) {
        inbound_->arrived(*transfer);
    } else {
        const py::object on_parcel = on_parcel_;
        call(on_parcel, py::cast(transfer));
    }
}

void bind_reader(py::module_& m) {
    py::class_<Reader, std::shared_ptr<Reader>>(m, "Reader")
        .def(py::init<int, std::shared_ptr<Inbound>, bool, py::object, py::object>())
        .def("read", &Reader::read)
        .def("on_readable", &Reader::on_readable)
        .def_property_readonly("reads", &Reader::reads)
        .def("stop", &Reader::stop);
}

}  // namespace columns
