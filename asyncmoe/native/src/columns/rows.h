// See `gather_rows` in asyncmoe/steps.py.
#pragma once

#include "view.h"

namespace columns {

// Returns (segments of one row, chunks, counts, slots, epochs, part_count, query_start, positions,
// cache_index, context, block_table, request), see `Rows` and `RowBatch`.
py::tuple gather_rows(py::handle chunks, py::handle rows, py::handle first_slot,
                      py::handle request, const py::list& slots_of, py::handle position,
                      py::handle epoch, py::handle part_count, py::handle pool,
                      int64_t block_tokens);

}  // namespace columns
