// A tensor's host memory as a memoryview.
#pragma once

#include "view.h"

namespace columns {

// The `size` bytes at `address`, which `owner` keeps in place. The view keeps the owner alive.
py::memoryview memory(py::handle owner, uintptr_t address, py::ssize_t size);

}  // namespace columns
