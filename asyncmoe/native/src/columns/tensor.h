// What a tensor is, as far as a payload is concerned.
#pragma once

#include "boxed.h"

namespace columns {

struct TensorRows {
    uint8_t dtype;  // code of ours
    int64_t rows, hidden;
    const uint8_t* data;  // null if it is no host memory
};

// The same, noted where there is time for it: torch's code is cold on the loop.
struct Described {
    PyObject* tensor;  // which; it lives as long as somebody asks
    TensorRows rows;

    // What was noted of this tensor in an object; null: nothing.
    static const TensorRows* of(py::handle object, py::handle tensor);

    int visit(visitproc, void*) { return 0; }
    void clear() {}
};

// A `Described`; None if it is not contiguous rows of a dtype of ours.
py::object described(py::handle tensor);

// Whether a tensor is contiguous rows of a dtype of ours, and which. Raises what Python raises.
bool describe(py::handle tensor, TensorRows* found);

void bind_tensor(py::module_& m);

}  // namespace columns
