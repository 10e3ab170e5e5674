// See asyncmoe/routing.py.
#pragma once

#include "view.h"

namespace columns {

// The parcels of a batch for expert stage `stage`; `hidden`: [rows, hidden]. Returns
// (parts uint8 [rows], [(rank, parcel)]).
py::tuple route(py::handle experts, py::handle weights, py::handle owner, py::ssize_t world,
                bool per_expert, py::handle slots, py::handle epochs, int64_t stage,
                const py::object& hidden);

}  // namespace columns
