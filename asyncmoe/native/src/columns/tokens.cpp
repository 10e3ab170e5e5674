// The token table's columns: which combine rows are taken in, and which slots they complete.
#include "tokens.h"

#include "block.h"

namespace columns {

Accepted accept_rows(int64_t stage, py::handle block, py::ssize_t rows, int64_t max_parts,
                     py::handle epoch_array, py::handle stage_array, py::handle open_array,
                     std::vector<Number>* done) {
    const Bytes bytes(block);
    if (!is_combine(bytes.size(), rows)) {
        throw py::value_error("a block does not fit its rows");
    }
    const Combine<const uint8_t> in(bytes.data(), rows);
    const auto epoch = column<uint32_t>(epoch_array, "epoch");
    const auto stage_of = column<Number>(stage_array, "stage");
    const auto open = writable<uint64_t>(open_array, "open");
    check_size(stage_of.size, epoch.size, "stage");
    check_size(open.size, epoch.size, "open");

    Fresh<int64_t> place(rows);
    std::vector<int64_t> kept;
    bool all = true;
    py::ssize_t taken = 0;
    for (py::ssize_t i = 0; i < rows; ++i) {
        const int64_t slot = in.slot[i];
        const int64_t part = in.part[i];
        const uint64_t bit = part < 64 ? uint64_t{1} << part : 0;
        if (slot >= epoch.size || part >= max_parts || epoch[slot] != in.epoch[i] ||
            stage_of[slot] != stage || !(open[slot] & bit)) {
            if (all) {  // the first to be dropped: from here on the rows that stay are noted
                for (py::ssize_t j = 0; j < i; ++j) kept.push_back(j);
                all = false;
            }
            continue;
        }
        if (!all) kept.push_back(i);
        const uint64_t left = open[slot] & ~bit;  // a repeated row finds it closed
        open[slot] = left;
        place[taken++] = slot * max_parts + part;
        if (left == 0) done->push_back(static_cast<Number>(slot));
    }
    if (all) return {place.array, py::none()};
    Fresh<int64_t> keep(kept.size()), places(kept.size());
    std::copy(kept.begin(), kept.end(), keep.data);
    std::copy(place.data, place.data + taken, places.data);
    return {places.array, keep.array};
}

py::tuple accept(int64_t stage, py::handle block, py::ssize_t rows, int64_t max_parts,
                 py::handle epoch, py::handle stage_of, py::handle open) {
    std::vector<Number> done;
    const Accepted accepted =
        accept_rows(stage, block, rows, max_parts, epoch, stage_of, open, &done);
    Fresh<int64_t> complete(done.size());
    std::copy(done.begin(), done.end(), complete.data);
    return py::make_tuple(complete.array, accepted.place, accepted.keep);
}

}  // namespace columns
