// Frames of parcels, see asyncmoe/wire.py. Bytes stand little-endian, as on all machines we run on.
#pragma once

#include "view.h"

namespace columns {

// Prelude and columns in one piece; None if the limits do not allow them.
py::object encode_parcel(const py::tuple& fields, py::handle limits, py::handle block);

// The fields of a parcel's prelude; None if it is none or not allowed.
py::object decode_parcel(py::handle data, py::handle limits);

// Whether a dispatch block's fan-outs add up to its pairs, are 1 at least, and its experts exist.
bool check_columns(py::handle block, py::ssize_t rows, py::ssize_t pairs, int64_t experts);

// Whether every row of a dispatch block has experts, all of them with an index in `local`.
bool all_local(py::handle block, py::ssize_t rows, py::ssize_t pairs, py::handle local);

}  // namespace columns
