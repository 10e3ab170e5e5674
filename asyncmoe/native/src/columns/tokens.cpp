// The token table's columns: which combine rows are taken in, and which slots they complete.
#include "tokens.h"

#include <algorithm>

#include "prefetch.h"

namespace columns {
namespace {

// Takes in rows from `row` on; returns the first that is not waited for, or `rows`.
py::ssize_t take_in(int64_t stage, const Combine<const uint8_t>& in, py::ssize_t row,
                    py::ssize_t rows, const Awaited& awaited, std::vector<Number>* done) {
    for (; row < rows; ++row) {
        const int64_t slot = in.slot[row];
        const int64_t part = in.part[row];
        if (slot >= awaited.epoch.size || part >= awaited.max_parts || part >= 64) break;
        const uint64_t bit = uint64_t{1} << part, open = awaited.open[slot];
        if (awaited.epoch[slot] != in.epoch[row] || awaited.stage[slot] != stage || !(open & bit)) {
            break;
        }
        awaited.open[slot] = open & ~bit;  // a repeated row finds it closed
        if (open == bit) done->push_back(static_cast<Number>(slot));
    }
    return row;
}

}  // namespace

Accepted accept_rows(int64_t stage, const Combine<const uint8_t>& in, py::ssize_t rows,
                     const Awaited& awaited, std::vector<Number>* done) {
    uint32_t before = ~uint32_t{0};
    for (py::ssize_t row = 0; row < rows; ++row) {
        const uint32_t slot = in.slot[row];
        if (slot >= awaited.epoch.size) break;
        prefetch_at(slot, before, awaited.epoch.data, awaited.stage.data, awaited.open.data);
        before = slot;
    }
    py::ssize_t end = take_in(stage, in, 0, rows, awaited, done);
    Accepted accepted{end == rows, {}};
    for (py::ssize_t begin = 0; !accepted.all;) {
        for (; begin < end; ++begin) accepted.kept.push_back(begin);
        if (++begin >= rows) break;  // behind the one that was dropped
        end = take_in(stage, in, begin, rows, awaited, done);
    }
    return accepted;
}

py::array_t<int64_t> places_of(const Combine<const uint8_t>& in, const Accepted& accepted,
                               py::ssize_t rows, int64_t max_parts) {
    const py::ssize_t count = accepted.all ? rows : accepted.kept.size();
    Fresh<int64_t> place(count);
    for (py::ssize_t i = 0; i < count; ++i) {
        const py::ssize_t row = accepted.all ? i : accepted.kept[i];
        place[i] = in.slot[row] * max_parts + in.part[row];
    }
    return place.array;
}

py::array_t<int64_t> rows_of(const Accepted& accepted) {
    Fresh<int64_t> rows(accepted.kept.size());
    std::copy(accepted.kept.begin(), accepted.kept.end(), rows.data);
    return rows.array;
}

py::tuple accept(int64_t stage, py::handle block, py::ssize_t rows, int64_t max_parts,
                 py::handle epoch, py::handle stage_of, py::handle open) {
    const Bytes bytes(block);
    if (!is_combine(bytes.size(), rows)) {
        throw py::value_error("a block does not fit its rows");
    }
    const Combine<const uint8_t> in(bytes.data(), rows);
    const Awaited awaited{column<uint32_t>(epoch, "epoch"), column<Number>(stage_of, "stage"),
                          writable<uint64_t>(open, "open"), max_parts};
    check_size(awaited.stage.size, awaited.epoch.size, "stage");
    check_size(awaited.open.size, awaited.epoch.size, "open");
    std::vector<Number> done;
    const Accepted accepted = accept_rows(stage, in, rows, awaited, &done);
    Fresh<int64_t> complete(done.size());
    std::copy(done.begin(), done.end(), complete.data);
    return py::make_tuple(complete.array, places_of(in, accepted, rows, max_parts),
                          accepted.all ? py::object(py::none()) : rows_of(accepted));
}

}  // namespace columns
