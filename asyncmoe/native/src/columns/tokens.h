// See asyncmoe/tokentable.py.
#pragma once

#include <vector>

#include "block.h"
#include "books.h"

namespace columns {

// The columns by slot that say which combine rows are waited for.
struct Awaited {
    Column<const uint32_t> epoch;
    Column<const Number> stage;
    Column<uint64_t> open;
    int64_t max_parts;
};

// Which rows of a block were taken in.
struct Accepted {
    bool all;
    std::vector<int64_t> kept;  // unless it is all
};

// Takes in the combine rows of `block`, from the wire and not trusted, that `stage` waits for.
// The slots that are now complete are put to `done`.
Accepted accept_rows(int64_t stage, const Combine<const uint8_t>& block, py::ssize_t rows,
                     const Awaited& awaited, std::vector<Number>* done);

// int64: the places of these rows of a block, and the rows themselves.
py::array_t<int64_t> places_of(const Combine<const uint8_t>& block, const Accepted& accepted,
                               py::ssize_t rows, int64_t max_parts);
py::array_t<int64_t> rows_of(const Accepted& accepted);

// The same: (slots that are now complete, place of each row taken, rows taken or None for all).
py::tuple accept(int64_t stage, py::handle block, py::ssize_t rows, int64_t max_parts,
                 py::handle epoch, py::handle stage_of, py::handle open);

}  // namespace columns
