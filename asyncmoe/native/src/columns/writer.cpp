#include "writer.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "function.h"

namespace columns {
namespace {

constexpr int kMostPieces = 64;
constexpr size_t kLongBytes = 256 << 10;  // see reader.cpp

void check_memory(const Outbound::Frame& frame) {
    if (frame.payload.data == nullptr && frame.payload.size != 0) {
        throw py::value_error("a payload that is not contiguous host memory");
    }
}

}  // namespace

Writer::Writer(int fd, py::object on_full, py::object on_fault)
    : fd_(fd), on_full_(std::move(on_full)), on_fault_(std::move(on_fault)) {}

void Writer::send(py::handle buffers, py::object on_sent) {
    const bool was_idle = idle();
    for (const py::handle buffer : py::iter(buffers)) add(buffer);
    if (!on_sent.is_none()) marks_.push_back({queued_, std::move(on_sent), nullptr});
    begin(was_idle);
}

py::object Writer::post(std::shared_ptr<Outbound> outbound, py::handle parcel) {
    const bool was_idle = idle();
    Outbound::Frame frame = outbound->frame(parcel);
    check_memory(frame);
    py::object posted = outbound->number(&frame);
    add(frame);
    marks_.push_back({queued_, posted, std::move(outbound)});
    begin(was_idle);
    return posted;
}

void Writer::send_parcel(Outbound* outbound, const PackedView& parcel) {
    const bool was_idle = idle();
    Outbound::Frame frame = outbound->frame(parcel);
    check_memory(frame);
    outbound->count(&frame);
    add(frame);
    begin(was_idle);
}

py::object Writer::poster(std::shared_ptr<Outbound> outbound, py::object link) {
    return function<1>(Poster{shared_from_this(), std::move(outbound), std::move(link)});
}

py::object Writer::Poster::operator()(PyObject* const* arguments) const {
    check();
    return writer->post(outbound, arguments[0]);
}

void Writer::Poster::post(const PackedView& parcel) const {
    check();
    writer->send_parcel(outbound.get(), parcel);
}

void Writer::Poster::check() const {
    static PyObject* const error = PyUnicode_InternFromString("error");
    if (!get(link, error).is_none()) link.attr("check")();
}

py::object Writer::repeater(py::bytes frame) {
    return function<0>([writer = shared_from_this(),
                        frame = std::move(frame)](PyObject* const*) -> py::object {
        const bool was_idle = writer->idle();
        writer->add(frame, reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(frame.ptr())),
                    static_cast<size_t>(PyBytes_GET_SIZE(frame.ptr())));
        writer->begin(was_idle);
        return py::none();
    });
}

void Writer::add(py::handle buffer) {
    Piece piece{};
    if (PyObject_GetBuffer(buffer.ptr(), &piece.view, PyBUF_SIMPLE) != 0) {
        throw py::error_already_set();
    }
    piece.data = static_cast<const uint8_t*>(piece.view.buf);
    piece.size = static_cast<size_t>(piece.view.len);
    if (piece.size == 0) {
        PyBuffer_Release(&piece.view);
        return;
    }
    pieces_.push_back(piece);
    queued_ += piece.size;
}

void Writer::add(const py::object& owner, const uint8_t* data, size_t size) {
    if (size == 0) return;
    Piece piece{};
    piece.what = Piece::kOwned;
    piece.owner = owner.inc_ref().ptr();
    piece.data = data;
    piece.size = size;
    pieces_.push_back(piece);
    queued_ += size;
}

void Writer::add(const Outbound::Frame& frame) {
    Piece piece{};
    piece.what = Piece::kPrelude;
    piece.size = kPreludeBytes;
    pieces_.push_back(piece);  // where it stays: the prelude is sent from there
    pieces_.back().data = pieces_.back().prelude;
    write_prelude(frame.head, pieces_.back().prelude);
    queued_ += kPreludeBytes;
    if (PyBytes_Check(frame.columns.ptr())) {
        add(frame.columns, reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(frame.columns.ptr())),
            static_cast<size_t>(PyBytes_GET_SIZE(frame.columns.ptr())));
    } else {
        add(frame.columns);
    }
    add(frame.payload.owner, frame.payload.data, frame.payload.size);
}

void Writer::drop_front() {
    Piece piece = pieces_.front();
    pieces_.pop_front();
    if (piece.what == Piece::kOwned) Py_DECREF(piece.owner);
    if (piece.what == Piece::kView) PyBuffer_Release(&piece.view);
}

// Something was queued: if nothing was before, give it to the kernel now.
void Writer::begin(bool was_idle) {
    if (was_idle && !write(1)) {
        const py::object on_full = on_full_;
        call(on_full);
    }
}

bool Writer::write(int most) {
    try {
        for (int call = 0; call < most && !idle(); ++call) {
            const py::ssize_t count = give();
            if (count < 0) return false;
            const bool full = count < static_cast<py::ssize_t>(offered_);
            taken(static_cast<size_t>(count));
            if (full && !idle()) return false;  // to ask again would only be refused
        }
    } catch (py::error_already_set& error) {
        if (!error.matches(PyExc_OSError)) throw;
        const py::object on_fault = on_fault_, value = error.value();
        call(on_fault, value);
        return true;
    }
    // What has no bytes at all is sent as soon as all before it is.
    if (idle()) taken(0);
    return idle();
}

// As many bytes as the kernel takes at once; -1 if it takes none now. Raises OSError.
py::ssize_t Writer::give() {
    iovec from[kMostPieces];
    size_t count = 0, bytes = 0;
    for (auto piece = pieces_.begin(); piece != pieces_.end() && count < kMostPieces; ++piece) {
        from[count++] = {const_cast<uint8_t*>(piece->data), piece->size};
        bytes += piece->size;
    }
    offered_ = bytes;
    msghdr message{};
    message.msg_iov = from;
    message.msg_iovlen = count;
    const auto send = [&] { return ::sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT); };
    py::ssize_t given;
    if (bytes > kLongBytes) {
        const py::gil_scoped_release others_may_run;
        given = send();
    } else {
        given = send();
    }
    if (given >= 0) return given;
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return -1;
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
}

// Account for bytes that the kernel has. What is called may send more.
void Writer::taken(size_t count) {
    sent_ += count;
    while (count != 0) {
        Piece& piece = pieces_.front();
        const size_t here = std::min(count, piece.size);
        piece.data += here;
        piece.size -= here;
        count -= here;
        if (piece.size == 0) drop_front();
    }
    while (!marks_.empty() && marks_.front().end <= sent_) {
        const Mark mark = std::move(marks_.front());
        marks_.pop_front();
        if (mark.outbound) {
            mark.outbound->sent(mark.on_sent);
        } else {
            call(mark.on_sent);
        }
    }
}

void Writer::stop() {
    fd_ = -1;
    while (!pieces_.empty()) drop_front();
    marks_.clear();
    on_full_ = on_fault_ = py::none();
}

void bind_writer(py::module_& m) {
    py::class_<Writer, std::shared_ptr<Writer>>(m, "Writer")
        .def(py::init<int, py::object, py::object>())
        .def("send", &Writer::send, py::arg("buffers"), py::arg("on_sent") = py::none())
        .def("post", &Writer::post)
        .def("poster", &Writer::poster)
        .def("repeater", &Writer::repeater)
        .def("write", &Writer::write)
        .def("stop", &Writer::stop)
        .def_property_readonly("idle", &Writer::idle)
        .def_property_readonly("sent", &Writer::sent);
}

}  // namespace columns
