// See asyncmoe/policy.py.
#pragma once

#include "view.h"

namespace columns {

// Which stages may run: (bool [stages], how many, the first of them or -1, loop time from which the
// first of those that wait for company may run, or None).
py::tuple look(py::handle rows, py::handle oldest_s, py::handle min_rows, py::handle linger_s,
               double now_s);

}  // namespace columns
