// Parcels: what is not allowed is left to the caller, who says why.
#include "wire.h"

#include <algorithm>

#include "block.h"

namespace columns {
namespace {

constexpr int64_t kMostExpert = 65535;

template <typename T>
bool fits(py::handle value, T& field) {
    const unsigned long long number = PyLong_AsUnsignedLongLong(value.ptr());
    if (number == ~0ull && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
    }
    field = static_cast<T>(number);
    return field == number;
}

}  // namespace

Prelude prelude_of(const py::tuple& fields) {
    Prelude p{};
    bool whole = fields.size() == 14;
    py::ssize_t next = 0;
    each_field(p, [&](auto& field, int) { whole = whole && fits(fields[next++], field); });
    if (!whole) throw py::value_error("these are no fields of a prelude");
    return p;
}

bool consistent(const uint8_t* block, py::ssize_t rows, py::ssize_t pairs, int64_t experts) {
    const Dispatch<const uint8_t> columns(block, rows, pairs);
    int64_t total = 0;
    bool any_empty = false;
    for (py::ssize_t i = 0; i < rows; ++i) {
        const uint8_t fanout = columns.fanout[i];
        total += fanout;
        any_empty |= fanout == 0;
    }
    if (total != pairs || any_empty) return false;
    int64_t highest = 0;
    for (py::ssize_t i = 0; i < pairs; ++i) {
        highest = std::max<int64_t>(highest, columns.expert[i]);
    }
    return experts > kMostExpert || highest < experts;
}

bool all_local(py::handle block, py::ssize_t rows, py::ssize_t pairs, py::handle local) {
    return all_local(block, rows, pairs, column<int64_t>(local, "local"));
}

bool all_local(py::handle block, py::ssize_t rows, py::ssize_t pairs,
               const Column<const int64_t>& index) {
    const Bytes bytes(block);
    if (!is_dispatch(bytes.size(), rows, pairs)) return false;
    const Dispatch<const uint8_t> columns(bytes.data(), rows, pairs);
    for (py::ssize_t i = 0; i < pairs; ++i) {
        const py::ssize_t expert = columns.expert[i];
        if (expert >= index.size || index[expert] < 0) return false;
    }
    for (py::ssize_t i = 0; i < rows; ++i) {
        if (columns.fanout[i] == 0) return false;
    }
    return true;
}

}  // namespace columns
