// From a batch's router output to the columns of each destination's parcel.
#include "routing.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "block.h"

namespace columns {
namespace {

struct Destination {
    py::ssize_t rows = 0, pairs = 0;      // of its parcel
    py::ssize_t row = 0, pair = 0;        // written so far
    py::ssize_t last = -1;                // row of the batch that was counted last
    py::bytes block;
    std::optional<Dispatch<uint8_t>> columns;
    std::optional<Fresh<int64_t>> index;  // rows of the batch, unless it gets them all
};

}  // namespace

py::tuple route(py::handle experts_array, py::handle weights_array, py::handle owner_array,
                py::ssize_t world, bool per_expert, py::handle slots_array,
                py::handle epochs_array) {
    const py::array experts_2d = array_of<int64_t>(experts_array, "experts", 2);
    const py::array weights_2d = array_of<float>(weights_array, "weights", 2);
    const py::ssize_t rows = experts_2d.shape(0), top_k = experts_2d.shape(1);
    check_size(weights_2d.size(), rows * top_k, "weights");
    const auto* experts = static_cast<const int64_t*>(experts_2d.data());
    const auto* weights = static_cast<const float*>(weights_2d.data());
    const auto owner = column<uint16_t>(owner_array, "owner");
    const auto slots = column<int64_t>(slots_array, "slots");
    const auto epochs = column<uint32_t>(epochs_array, "epochs");
    check_size(slots.size, rows, "slots");
    check_size(epochs.size, rows, "epochs");

    std::vector<Destination> to(world);
    for (py::ssize_t row = 0; row < rows; ++row) {
        for (py::ssize_t j = 0; j < top_k; ++j) {
            const py::ssize_t rank = owner.at(experts[row * top_k + j], "owner");
            if (rank >= world) throw py::index_error("owner of an expert is outside the world");
            Destination& d = to[rank];
            ++d.pairs;
            if (d.last != row) {
                d.last = row;
                ++d.rows;
            }
        }
    }
    for (Destination& d : to) {
        d.last = -1;
        if (d.rows == 0) continue;
        uint8_t* data;
        d.block = new_bytes(dispatch_bytes(d.rows, d.pairs), &data);
        d.columns.emplace(data, d.rows, d.pairs);
        if (d.rows < rows) d.index.emplace(d.rows);
    }

    Fresh<int64_t> parts(rows);
    std::vector<py::ssize_t> visited;  // ranks of one row, ascending
    for (py::ssize_t row = 0; row < rows; ++row) {
        const int64_t* chosen = experts + row * top_k;
        visited.clear();
        for (py::ssize_t j = 0; j < top_k; ++j) {
            const py::ssize_t rank = owner[chosen[j]];
            Destination& d = to[rank];
            if (d.last == row) continue;
            d.last = row;
            visited.insert(std::upper_bound(visited.begin(), visited.end(), rank), rank);
            d.columns->slot.set(d.row, static_cast<uint32_t>(slots[row]));
            d.columns->epoch.set(d.row, epochs[row]);
            d.columns->fanout.set(d.row, 0);
            if (d.index) (*d.index)[d.row] = row;
            ++d.row;
        }
        for (py::ssize_t j = 0; j < top_k; ++j) {
            const py::ssize_t rank = owner[chosen[j]];
            Destination& d = to[rank];
            const auto part =
                per_expert
                    ? j
                    : std::lower_bound(visited.begin(), visited.end(), rank) - visited.begin();
            d.columns->weight.set(d.pair, weights[row * top_k + j]);
            d.columns->expert.set(d.pair, static_cast<uint16_t>(chosen[j]));
            d.columns->part.set(d.pair, static_cast<uint8_t>(part));
            d.columns->fanout.set(d.row - 1, d.columns->fanout[d.row - 1] + 1);
            ++d.pair;
        }
        parts[row] = per_expert ? top_k : static_cast<int64_t>(visited.size());
    }

    py::list routes;
    for (py::ssize_t rank = 0; rank < world; ++rank) {
        Destination& d = to[rank];
        if (d.rows == 0) continue;
        const py::object index = d.index ? py::object(d.index->array) : py::object(py::none());
        routes.append(py::make_tuple(rank, d.rows, d.pairs, d.block, index));
    }
    return py::make_tuple(parts.array, routes);
}

}  // namespace columns
