// Non-blocking reads and writes of a stream socket, scattered over buffers.
#include "stream.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>

namespace columns {
namespace {

// Beyond this the copy takes long enough for others to want the interpreter meanwhile; below it,
// giving the lock up and waiting for it again costs more than the call.
constexpr py::ssize_t kLongBytes = 256 << 10;
constexpr int kMostBuffers = 64;

// Buffers of Python objects as the kernel wants them, held while this lives.
class Vector {
  public:
    explicit Vector(int flags) : flags_(flags) {}
    Vector(const Vector&) = delete;
    Vector& operator=(const Vector&) = delete;
    ~Vector() {
        for (int i = 0; i < count_; ++i) PyBuffer_Release(&views_[i]);
    }

    bool full() const { return count_ == kMostBuffers; }

    void add(py::handle object) {
        Py_buffer& view = views_[count_];
        if (PyObject_GetBuffer(object.ptr(), &view, flags_) != 0) throw py::error_already_set();
        parts_[count_++] = {view.buf, static_cast<size_t>(view.len)};
        bytes_ += view.len;
    }

    // The number of bytes that `call` moved; -1 if it would have had to wait. Raises OSError.
    template <typename F>
    py::ssize_t move(F call) {
        msghdr message{};
        message.msg_iov = parts_;
        message.msg_iovlen = count_;
        py::ssize_t moved;
        if (bytes_ > kLongBytes) {
            const py::gil_scoped_release others_may_run;
            moved = call(&message);
        } else {
            moved = call(&message);
        }
        if (moved >= 0) return moved;
        if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return -1;
        PyErr_SetFromErrno(PyExc_OSError);
        throw py::error_already_set();
    }

  private:
    const int flags_;
    int count_ = 0;
    py::ssize_t bytes_ = 0;
    Py_buffer views_[kMostBuffers];
    iovec parts_[kMostBuffers];
};

}  // namespace

py::ssize_t send(int fd, py::handle buffers) {
    Vector from(PyBUF_SIMPLE);
    for (const py::handle buffer : py::iter(buffers)) {
        if (from.full()) break;
        from.add(buffer);
    }
    return from.move([fd](msghdr* m) { return ::sendmsg(fd, m, MSG_NOSIGNAL | MSG_DONTWAIT); });
}

py::ssize_t receive(int fd, py::handle buffers) {
    Vector to(PyBUF_WRITABLE);
    for (const py::handle buffer : py::iter(buffers)) {
        if (to.full()) break;
        to.add(buffer);
    }
    return to.move([fd](msghdr* m) { return ::recvmsg(fd, m, MSG_DONTWAIT); });
}

}  // namespace columns
