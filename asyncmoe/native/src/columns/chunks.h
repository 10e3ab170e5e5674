// See asyncmoe/chunks.py.
#pragma once

#include "view.h"

namespace columns {

// [(stage, chunks, rows of each, rows together)], in the order of each stage's first chunk.
py::list by_stage(py::handle chunks, py::handle stage, py::handle rows);

}  // namespace columns
