// See asyncmoe/expertcolumns.py.
#pragma once

#include <memory>
#include <vector>

#include "view.h"

namespace columns {

// The columns of a dispatch parcel that came from rank `source`. Raises ValueError if the block
// does not fit rows and pairs.
struct Dispatched {
    Dispatched(int64_t source, py::ssize_t rows, py::ssize_t pairs, py::handle block);

    int64_t source;
    py::ssize_t rows, pairs;
    std::unique_ptr<Bytes> block;
};

// Of parcels, those of one source next to each other: (row [pairs], weight [pairs],
// counts [local experts], gather [out_rows, width], [(source, out_rows, rows, block of the combine
// parcel)]). Pairs of weight 0 are left out.
py::tuple expert_columns(const std::vector<Dispatched>& parcels, py::handle local,
                         py::ssize_t local_experts, bool per_expert);

// The same; `parcels`: [(source, rows, pairs, block)].
py::tuple expert_batch(const py::list& parcels, py::handle local, py::ssize_t local_experts,
                       bool per_expert);

}  // namespace columns
