// See asyncmoe/link.py.
#pragma once

#include "view.h"

namespace columns {

// Gives the kernel what it takes of `buffers`, 64 of them at most. Returns the number of bytes; -1
// if it takes nothing now. Raises OSError.
py::ssize_t send(int fd, py::handle buffers);

// Fills `buffers` with what the kernel has, likewise. 0: the other side has ended the stream.
py::ssize_t receive(int fd, py::handle buffers);

}  // namespace columns
