// The token table's columns: which combine rows are taken in, and which slots they complete.
#include "tokens.h"

#include <vector>

#include "block.h"

namespace columns {

py::tuple accept(int64_t stage, py::handle block, py::ssize_t rows, int64_t max_parts,
                 py::handle epoch_array, py::handle stage_array, py::handle open_array) {
    const Bytes bytes(block);
    if (!is_combine(bytes.size(), rows)) {
        throw py::value_error("a block does not fit its rows");
    }
    const Combine<const uint8_t> in(bytes.data(), rows);
    const auto epoch = column<uint32_t>(epoch_array, "epoch");
    const auto stage_of = column<int64_t>(stage_array, "stage");
    const auto open = writable<uint64_t>(open_array, "open");
    check_size(stage_of.size, epoch.size, "stage");
    check_size(open.size, epoch.size, "open");

    Fresh<int64_t> place(rows);
    std::vector<int64_t> kept, done;
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
        open[slot] &= ~bit;  // a repeated row finds it closed
        place[taken++] = slot * max_parts + part;
        if (open[slot] == 0) done.push_back(slot);
    }
    Fresh<int64_t> complete(done.size());
    std::copy(done.begin(), done.end(), complete.data);
    if (all) return py::make_tuple(complete.array, place.array, py::none());
    Fresh<int64_t> keep(kept.size()), places(kept.size());
    std::copy(kept.begin(), kept.end(), keep.data);
    std::copy(place.data, place.data + taken, places.data);
    return py::make_tuple(complete.array, places.array, keep.array);
}

void expect(py::handle slots_array, int64_t stage, py::handle parts_array, py::handle stage_array,
            py::handle count_array, py::handle open_array) {
    const auto slots = column<int64_t>(slots_array, "slots");
    const auto parts = column<int64_t>(parts_array, "parts");
    const auto stage_of = writable<int64_t>(stage_array, "stage");
    const auto count = writable<int64_t>(count_array, "part_count");
    const auto open = writable<uint64_t>(open_array, "open");
    check_size(parts.size, slots.size, "parts");
    check_size(count.size, stage_of.size, "part_count");
    check_size(open.size, stage_of.size, "open");
    for (py::ssize_t i = 0; i < slots.size; ++i) {
        if (parts[i] < 0 || parts[i] > 64) throw py::index_error("parts of a token");
        stage_of.at(slots[i], "the token table") = stage;
        count[slots[i]] = parts[i];
        open[slots[i]] = parts[i] == 64 ? ~uint64_t{0} : (uint64_t{1} << parts[i]) - 1;
    }
}

bool all_alive(py::handle ends_array, py::handle slots_array, py::handle epochs_array,
               py::handle epoch_array) {
    const auto ends = column<int64_t>(ends_array, "ends");
    const auto slots = column<int64_t>(slots_array, "slots");
    const auto epochs = column<uint32_t>(epochs_array, "epochs");
    const auto epoch = column<uint32_t>(epoch_array, "epoch");
    check_size(epochs.size, slots.size, "epochs");
    bool alive = true;
    for (py::ssize_t i = 0; i < ends.size; ++i) {
        const int64_t last = ends[i] - 1;
        alive &= epoch.at(slots.at(last, "slots"), "epoch") == epochs[last];
    }
    return alive;
}

}  // namespace columns
