// The chunk table's columns: which chunks go into which queue.
#include "chunks.h"

#include <vector>

#include "books.h"

namespace columns {
namespace {

py::array_t<int64_t> as_array(const std::vector<int64_t>& values) {
    Fresh<int64_t> fresh(values.size());
    std::copy(values.begin(), values.end(), fresh.data);
    return fresh.array;
}

}  // namespace

py::list by_stage(py::handle chunks_array, py::handle stage_array, py::handle rows_array) {
    const auto chunks = column<int64_t>(chunks_array, "chunks");
    const auto stage = column<Number>(stage_array, "stage");
    const auto rows = column<Number>(rows_array, "rows");
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
