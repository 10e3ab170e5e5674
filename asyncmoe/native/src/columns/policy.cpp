// The batch policy: which stages may run, and when the next one may.
#include "policy.h"

#include <algorithm>
#include <limits>

namespace columns {

py::tuple look(py::handle rows_array, py::handle oldest_array, py::handle min_array,
               py::handle linger_array, double now_s) {
    const auto rows = column<int64_t>(rows_array, "rows");
    const auto oldest_s = column<double>(oldest_array, "oldest_s");
    const auto min_rows = column<int64_t>(min_array, "min_rows");
    const auto linger_s = column<double>(linger_array, "linger_s");
    check_size(oldest_s.size, rows.size, "oldest_s");
    check_size(min_rows.size, rows.size, "min_rows");
    check_size(linger_s.size, rows.size, "linger_s");
    Fresh<bool> runnable(rows.size);
    py::ssize_t count = 0, first = -1;
    double next_s = std::numeric_limits<double>::infinity();
    for (py::ssize_t stage = 0; stage < rows.size; ++stage) {
        const bool enough = rows[stage] >= min_rows[stage];
        const double lingered_s = oldest_s[stage] + linger_s[stage];
        const bool may_run = enough || (rows[stage] > 0 && lingered_s <= now_s);
        runnable[stage] = may_run;
        if (may_run && count++ == 0) first = stage;
        if (!enough && rows[stage] > 0) next_s = std::min(next_s, lingered_s);
    }
    const bool waits = next_s < std::numeric_limits<double>::infinity();
    return py::make_tuple(runnable.array, count, first,
                          waits ? py::object(py::float_(next_s)) : py::object(py::none()));
}

}  // namespace columns
