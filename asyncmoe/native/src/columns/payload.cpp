// Rows of hidden state, moved by address: what numpy columns say, done to a tensor's memory.
#include "payload.h"

#include <cstring>

#include "block.h"

namespace columns {
namespace {

// Row i at `from` goes to row `place(i)` at `to`. Raises IndexError, with nothing copied, unless
// all are among `to_rows`.
template <typename F>
void scatter_to(uintptr_t to, int64_t to_rows, int64_t rows, F place, uintptr_t from,
                int64_t row_bytes) {
    for (int64_t i = 0; i < rows; ++i) {
        if (place(i) < 0 || place(i) >= to_rows) throw py::index_error("row out of range");
    }
    const py::gil_scoped_release others_may_run;
    for (int64_t i = 0; i < rows; ++i) {
        std::memcpy(reinterpret_cast<void*>(to + place(i) * row_bytes),
                    reinterpret_cast<const void*>(from + i * row_bytes), row_bytes);
    }
}

}  // namespace

void scatter(uintptr_t to, int64_t to_rows, py::handle places_array, uintptr_t from,
             int64_t row_bytes) {
    const auto places = column<int64_t>(places_array, "places");
    const auto place = [&](int64_t i) { return places[i]; };
    scatter_to(to, to_rows, places.size, place, from, row_bytes);
}

void scatter_combine(uintptr_t to, int64_t to_rows, py::handle block, int64_t rows,
                     int64_t max_parts, uintptr_t from, int64_t row_bytes) {
    const Bytes bytes(block);
    if (!is_combine(bytes.size(), rows)) {
        throw py::value_error("a block does not fit its rows");
    }
    const Combine<const uint8_t> columns(bytes.data(), rows);
    const auto place = [&](int64_t i) { return columns.slot[i] * max_parts + columns.part[i]; };
    scatter_to(to, to_rows, rows, place, from, row_bytes);
}

}  // namespace columns
