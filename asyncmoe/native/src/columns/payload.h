// Rows of hidden state by address. The caller keeps the tensors alive and vouches for their sizes.
#pragma once

#include "view.h"

namespace columns {

// Row `places[i]` of the `to_rows` rows at `to` becomes row i at `from`.
void scatter(uintptr_t to, int64_t to_rows, py::handle places, uintptr_t from, int64_t row_bytes);
// The same for all rows of a combine parcel with these columns: the place of each is
// slot * max_parts + part.
void scatter_combine(uintptr_t to, int64_t to_rows, py::handle block, int64_t rows,
                     int64_t max_parts, uintptr_t from, int64_t row_bytes);

}  // namespace columns
