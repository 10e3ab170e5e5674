// See asyncmoe/tokentable.py.
#pragma once

#include <vector>

#include "books.h"

namespace columns {

// What became of combine rows.
struct Accepted {
    py::array_t<int64_t> place;  // of each row that was taken in
    py::object keep;             // int64: the rows taken in; None: all
};

// Takes in the combine rows of `block`, from the wire and not trusted, that `stage` waits for.
// The slots that are now complete are put to `done`.
Accepted accept_rows(int64_t stage, py::handle block, py::ssize_t rows, int64_t max_parts,
                     py::handle epoch, py::handle stage_of, py::handle open,
                     std::vector<Number>* done);

// The same: (slots that are now complete, place of each row taken, rows taken or None for all).
py::tuple accept(int64_t stage, py::handle block, py::ssize_t rows, int64_t max_parts,
                 py::handle epoch, py::handle stage_of, py::handle open);

}  // namespace columns
