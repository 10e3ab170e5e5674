// Rows of hidden state by address. The caller keeps the tensors alive and vouches for their sizes.
#pragma once

#include "view.h"

namespace columns {

// Row `places[i]` of the `to_rows` rows at `to` becomes row i at `from`.
void scatter(uintptr_t to, int64_t to_rows, py::handle places, uintptr_t from, int64_t row_bytes);

}  // namespace columns
