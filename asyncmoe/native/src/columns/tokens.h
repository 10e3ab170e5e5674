// See asyncmoe/tokentable.py.
#pragma once

#include "view.h"

namespace columns {

// Takes in the combine rows of `block`, from the wire and not trusted, that `stage` waits for.
// Returns (slots that are now complete, place of each row taken, rows taken or None for all).
py::tuple accept(int64_t stage, py::handle block, py::ssize_t rows, int64_t max_parts,
                 py::handle epoch, py::handle stage_of, py::handle open);

// The rows of `slots` were dispatched to `stage`, and `parts[i]` parts will come back.
void expect(py::handle slots, int64_t stage, py::handle parts, py::handle stage_of,
            py::handle part_count, py::handle open);

// Whether the last row of every segment is of the slot's present generation.
bool all_alive(py::handle ends, py::handle slots, py::handle epochs, py::handle epoch);

}  // namespace columns
