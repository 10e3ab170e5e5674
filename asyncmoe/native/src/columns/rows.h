// The rows of an attention or head batch: the compiled twin of `Gathered` in asyncmoe/rows.py.
#pragma once

#include <memory>

#include "books.h"
#include "boxed.h"

namespace columns {

// What was read of the tables, in as few lines of the caches as may be.
struct Gathered {
    // See the twin. `pool`: a `BlockPool`.
    py::tuple columns(py::handle pool) const;
    // A column of the token table at the rows' slots: int64 [rows].
    py::array_t<int64_t> at_slots(py::handle column) const;

    // [segments]
    const Number* request() const { return numbers.get(); }
    const Number* counts() const { return request() + segments; }
    // [rows]
    const Number* slots() const { return counts() + segments; }
    const Number* positions() const { return slots() + rows; }
    const uint32_t* epochs() const {
        return reinterpret_cast<const uint32_t*>(positions() + rows);
    }
    const uint8_t* part_count() const { return reinterpret_cast<const uint8_t*>(epochs() + rows); }

    int visit(visitproc, void*) { return 0; }
    void clear() {}

    int64_t singles = 0, segments = 0, rows = 0;
    std::unique_ptr<Number[]> numbers;
};

// (chunks in the order of their segments, `Gathered`)
py::tuple gather_rows(const Books& books, const py::object& chunks);

void bind_rows(py::module_& m);

}  // namespace columns
