// Columns of parcels, see asyncmoe/wire.py.
#pragma once

#include "prelude.h"

namespace columns {

// A `Prelude` of asyncmoe/wire.py. Raises ValueError unless its fields fit.
Prelude prelude_of(const py::tuple& fields);

// Whether a dispatch block's fan-outs add up to its pairs, are 1 at least, and its experts exist.
bool consistent(const uint8_t* block, py::ssize_t rows, py::ssize_t pairs, int64_t experts);

// Whether every row of a dispatch block has experts, all of them with an index in `local`.
bool all_local(py::handle block, py::ssize_t rows, py::ssize_t pairs, py::handle local);
bool all_local(py::handle block, py::ssize_t rows, py::ssize_t pairs,
               const Column<const int64_t>& local);

}  // namespace columns
