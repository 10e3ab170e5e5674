// What a tensor is, as far as a payload is concerned.
#pragma once

#include "view.h"

namespace columns {

struct TensorRows {
    uint8_t dtype;  // code of ours
    int64_t rows, hidden;
    const uint8_t* data;  // null if it is no host memory
};

// Whether a tensor is contiguous rows of a dtype of ours, and which. Raises what Python raises.
bool describe(py::handle tensor, TensorRows* found);

}  // namespace columns
