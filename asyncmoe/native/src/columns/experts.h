// See `expert_step` in asyncmoe/steps.py.
#pragma once

#include "view.h"

namespace columns {

// `parcels`: [(source, rows, pairs, block)], those of one source next to each other. Returns
// (row [pairs], weight [pairs], counts [local experts], gather [out_rows, width],
// [(source, out_rows, rows, block of the combine parcel)]). Pairs of weight 0 are left out.
py::tuple expert_batch(const py::list& parcels, py::handle local, py::ssize_t local_experts,
                       bool per_expert);

}  // namespace columns
