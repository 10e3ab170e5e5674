// The chunk table's columns: which chunks may go on, and into which queue.
#include "chunks.h"

#include <vector>

namespace columns {
namespace {

constexpr int64_t kNone = -1;

py::array_t<int64_t> as_array(const std::vector<int64_t>& values) {
    Fresh<int64_t> fresh(values.size());
    std::copy(values.begin(), values.end(), fresh.data);
    return fresh.array;
}

}  // namespace

py::array_t<int64_t> complete(py::handle chunk_of_row_array, py::handle missing_array,
                              py::handle earlier_array, py::handle stage_array,
                              py::handle parked_array) {
    const auto chunk_of_row = column<int64_t>(chunk_of_row_array, "chunk_of_row");
    const auto missing = writable<int64_t>(missing_array, "missing");
    const auto earlier = column<int64_t>(earlier_array, "earlier");
    const auto stage = column<int64_t>(stage_array, "stage");
    const auto parked = writable<bool>(parked_array, "parked");
    check_size(earlier.size, missing.size, "earlier");
    check_size(stage.size, missing.size, "stage");
    check_size(parked.size, missing.size, "parked");
    std::vector<int64_t> ready;
    ready.reserve(chunk_of_row.size);
    for (py::ssize_t i = 0; i < chunk_of_row.size; ++i) {
        const int64_t chunk = chunk_of_row[i];
        if (--missing.at(chunk, "the chunk table") != 0) continue;
        const int64_t before = earlier[chunk];
        if (before != kNone && stage.at(before, "the chunk table") <= stage[chunk]) {
            parked[chunk] = true;
        } else {
            ready.push_back(chunk);
        }
    }
    return as_array(ready);
}

bool leave(py::handle chunks_array, int64_t next, py::handle counts_array, py::handle stage_array,
           py::handle missing_array, py::handle later_array) {
    const auto chunks = column<int64_t>(chunks_array, "chunks");
    const auto counts = column<int64_t>(counts_array, "counts");
    const auto stage = writable<int64_t>(stage_array, "stage");
    const auto missing = writable<int64_t>(missing_array, "missing");
    const auto later = column<int64_t>(later_array, "later");
    check_size(counts.size, chunks.size, "counts");
    check_size(missing.size, stage.size, "missing");
    check_size(later.size, stage.size, "later");
    bool followed = false;
    for (py::ssize_t i = 0; i < chunks.size; ++i) {
        stage.at(chunks[i], "the chunk table") = next;
        missing[chunks[i]] = counts[i];
        followed |= later[chunks[i]] != kNone;
    }
    return followed;
}

py::list by_stage(py::handle chunks_array, py::handle stage_array, py::handle rows_array) {
    const auto chunks = column<int64_t>(chunks_array, "chunks");
    const auto stage = column<int64_t>(stage_array, "stage");
    const auto rows = column<int64_t>(rows_array, "rows");
    check_size(rows.size, stage.size, "rows");
    py::list groups;
    std::vector<bool> placed(chunks.size, false);
    for (py::ssize_t first = 0; first < chunks.size; ++first) {
        if (placed[first]) continue;
        const int64_t here = stage.at(chunks[first], "the chunk table");
        std::vector<int64_t> members, rows_of_each;
        int64_t total = 0;
        for (py::ssize_t i = first; i < chunks.size; ++i) {
            if (placed[i] || stage.at(chunks[i], "the chunk table") != here) continue;
            placed[i] = true;
            members.push_back(chunks[i]);
            rows_of_each.push_back(rows[chunks[i]]);
            total += rows[chunks[i]];
        }
        groups.append(py::make_tuple(here, as_array(members), as_array(rows_of_each), total));
    }
    return groups;
}

}  // namespace columns
