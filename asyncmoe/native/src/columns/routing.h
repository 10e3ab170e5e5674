// See asyncmoe/routing.py.
#pragma once

#include "view.h"

namespace columns {

// Returns (parts int64 [rows], [(rank, rows, pairs, block, rows of the batch or None for all)]).
py::tuple route(py::handle experts, py::handle weights, py::handle owner, py::ssize_t world,
                bool per_expert, py::handle slots, py::handle epochs);

}  // namespace columns
