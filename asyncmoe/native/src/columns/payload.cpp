// Rows of hidden state, moved by address: what numpy columns say, done to a tensor's memory.
#include "payload.h"

#include <cstring>

namespace columns {
namespace {

// Raises IndexError unless all `rows` are below `limit`.
void check_rows(const Column<const int64_t>& rows, int64_t limit) {
    for (py::ssize_t i = 0; i < rows.size; ++i) {
        if (rows[i] < 0 || rows[i] >= limit) throw py::index_error("row out of range");
    }
}

}  // namespace

void scatter(uintptr_t to, int64_t to_rows, py::handle places_array, uintptr_t from,
             int64_t row_bytes) {
    const auto places = column<int64_t>(places_array, "places");
    check_rows(places, to_rows);
    const py::gil_scoped_release others_may_run;
    for (py::ssize_t i = 0; i < places.size; ++i) {
        std::memcpy(reinterpret_cast<void*>(to + places[i] * row_bytes),
                    reinterpret_cast<const void*>(from + i * row_bytes), row_bytes);
    }
}

}  // namespace columns
