// See asyncmoe/chunks.py.
#pragma once

#include "view.h"

namespace columns {

// A row of each given chunk has all its parts. Returns the complete chunks that may enter their
// stage; those that may not are parked.
py::array_t<int64_t> complete(py::handle chunk_of_row, py::handle missing, py::handle earlier,
                              py::handle stage, py::handle parked);

// `chunks` go on to stage `next` and wait for `counts` rows. Whether any has a later chunk.
bool leave(py::handle chunks, int64_t next, py::handle counts, py::handle stage,
           py::handle missing, py::handle later);

// [(stage, chunks, rows of each, rows together)], in the order of each stage's first chunk.
py::list by_stage(py::handle chunks, py::handle stage, py::handle rows);

}  // namespace columns
