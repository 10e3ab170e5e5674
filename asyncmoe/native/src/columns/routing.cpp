// From a batch's router output to the columns of each destination's parcel.
#include "routing.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "block.h"
#include "parcel.h"

namespace columns {
namespace {

struct Destination {
    py::ssize_t rows = 0, pairs = 0;      // of its parcel
    py::ssize_t row = 0, pair = 0;        // written so far
    py::ssize_t last = -1;                // row of the batch that was counted last
    py::bytes block;
    std::optional<Dispatch<uint8_t>> columns;
    py::ssize_t first = 0;                // of its rows among those of all that do not get all
};

struct Attributes {
    PyObject* const index_select = PyUnicode_InternFromString("index_select");
    PyObject* const split = PyUnicode_InternFromString("split_with_sizes");
    const py::object from_numpy = py::module_::import("torch").attr("from_numpy");
    const py::object rows = py::int_(0);  // the dimension
};

const Attributes& attributes() {
    static const Attributes* const found = new Attributes;
    return *found;
}

// The rows of `hidden` that go to each destination, in order: one copy for all of them that do not
// get every row.
py::list payloads_of(const std::vector<Destination>& to, py::ssize_t rows, const py::object& hidden,
                     const Fresh<int64_t>& index) {
    const Attributes& names_of = attributes();
    py::list sizes, payloads;
    for (const Destination& d : to) {
        if (d.rows != 0 && d.rows < rows) sizes.append(d.rows);
    }
    py::object parts;
    if (!sizes.empty()) {
        const py::object copy = call_method(hidden, names_of.index_select, names_of.rows,
                                            call(names_of.from_numpy, index.array));
        parts = sizes.size() == 1 ? py::make_tuple(copy) : call_method(copy, names_of.split, sizes);
    }
    py::ssize_t next = 0;
    for (const Destination& d : to) {
        if (d.rows == 0) continue;
        payloads.append(d.rows == rows ? hidden : py::object(parts[py::int_(next++)]));
    }
    return payloads;
}

}  // namespace

py::tuple route(py::handle experts_array, py::handle weights_array, py::handle owner_array,
                py::ssize_t world, bool per_expert, py::handle slots_array,
                py::handle epochs_array, int64_t stage, const py::object& hidden) {
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
    if (top_k > 64) throw py::value_error("more experts of a row than it has parts");

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
    py::ssize_t copied = 0;  // rows for ranks that do not get all
    for (Destination& d : to) {
        d.last = -1;
        if (d.rows == 0) continue;
        uint8_t* data;
        d.block = new_bytes(dispatch_bytes(d.rows, d.pairs), &data);
        d.columns.emplace(data, d.rows, d.pairs);
        d.first = copied;
        if (d.rows < rows) copied += d.rows;
    }
    Fresh<int64_t> index(copied);

    Fresh<uint8_t> parts(rows);
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
            if (d.rows < rows) index[d.first + d.row] = row;
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
        parts[row] = static_cast<uint8_t>(per_expert ? top_k : visited.size());
    }

    const py::list payloads = payloads_of(to, rows, hidden, index);
    py::list parcels;
    for (py::ssize_t rank = 0; rank < world; ++rank) {
        const Destination& d = to[rank];
        if (d.rows == 0) continue;
        const py::handle payload = PyList_GET_ITEM(payloads.ptr(), parcels.size());
        parcels.append(py::make_tuple(rank, make_parcel(kDispatch, stage, d.rows, d.pairs, d.block,
                                                        payload, 0, described(payload))));
    }
    return py::make_tuple(parts.array, parcels);
}

}  // namespace columns
