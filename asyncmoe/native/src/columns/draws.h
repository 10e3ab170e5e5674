// See asyncmoe/workload/draws.py.
#pragma once

#include "view.h"

namespace columns {

// int64 [rows, count]: distinct values of each row, from the alias tables `limit` and `other` and
// the `weights` of what they draw; `start` is the part of the rows' keys that all have in common.
py::array draw_distinct(uint64_t start, py::handle request_ids, py::handle positions,
                        py::handle limit, py::handle other, py::handle weights,
                        py::ssize_t count);

}  // namespace columns
