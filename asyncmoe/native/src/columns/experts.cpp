// The pairs of an expert batch, sorted by local expert, and the columns of its way back.
#include "experts.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "block.h"

namespace columns {
namespace {

Dispatch<const uint8_t> columns_of(const Dispatched& parcel) {
    return {parcel.block->data(), parcel.rows, parcel.pairs};
}

// Writes the way back of consecutive segments of one home: [first, last).
py::tuple way_back(const std::vector<Dispatched>& segments, size_t first, size_t last,
                   bool per_expert) {
    py::ssize_t rows = 0, pairs = 0;
    for (size_t i = first; i < last; ++i) {
        rows += segments[i].rows;
        pairs += segments[i].pairs;
    }
    const py::ssize_t out_rows = per_expert ? pairs : rows;
    uint8_t* data;
    py::bytes block = new_bytes(combine_bytes(out_rows), &data);
    const Combine<uint8_t> out(data, out_rows);
    py::ssize_t next = 0;
    for (size_t i = first; i < last; ++i) {
        const auto in = columns_of(segments[i]);
        py::ssize_t pair = 0;
        for (py::ssize_t row = 0; row < segments[i].rows; ++row) {
            const py::ssize_t fanout = in.fanout[row];
            for (py::ssize_t j = 0; j < (per_expert ? fanout : 1); ++j, ++next) {
                out.slot.set(next, in.slot[row]);
                out.epoch.set(next, in.epoch[row]);
                out.part.set(next, in.part[pair + j]);
            }
            pair += fanout;
        }
    }
    return py::make_tuple(segments[first].source, out_rows, rows, block);
}

}  // namespace

Dispatched::Dispatched(int64_t source, py::ssize_t rows, py::ssize_t pairs, py::handle block)
    : source(source), rows(rows), pairs(pairs), block(std::make_unique<Bytes>(block)) {
    if (!is_dispatch(this->block->size(), rows, pairs)) {
        throw py::value_error("a block does not fit its rows and pairs");
    }
}

py::tuple expert_batch(const py::list& parcels, py::handle local, py::ssize_t local_experts,
                       bool per_expert) {
    std::vector<Dispatched> segments;
    for (const py::handle parcel : parcels) {
        const auto fields = py::cast<py::tuple>(parcel);
        segments.emplace_back(fields[0].cast<int64_t>(), fields[1].cast<py::ssize_t>(),
                              fields[2].cast<py::ssize_t>(), fields[3]);
    }
    return expert_columns(segments, local, local_experts, per_expert);
}

py::tuple expert_columns(const std::vector<Dispatched>& segments, py::handle local_array,
                         py::ssize_t local_experts, bool per_expert) {
    const auto local = column<int64_t>(local_array, "local");
    py::ssize_t rows = 0, pairs = 0, width = 1;
    for (const Dispatched& segment : segments) {
        rows += segment.rows;
        pairs += segment.pairs;
    }
    Fresh<int64_t> counts(local_experts);
    std::fill_n(counts.data, local_experts, 0);
    std::vector<int64_t> expert_of_pair;  // -1 for a pair of weight 0, which adds nothing
    expert_of_pair.reserve(pairs);
    py::ssize_t counted = 0;
    for (const Dispatched& segment : segments) {
        const auto in = columns_of(segment);
        int64_t total = 0;
        for (py::ssize_t row = 0; row < segment.rows; ++row) {
            const int64_t fanout = in.fanout[row];
            if (fanout == 0) throw py::value_error("a row without experts");
            total += fanout;
            width = std::max<py::ssize_t>(width, fanout);
        }
        check_size(segment.pairs, total, "the pair columns");
        for (py::ssize_t pair = 0; pair < segment.pairs; ++pair) {
            const int64_t expert = local.at(in.expert[pair], "local");
            if (expert < 0 || expert >= local_experts) {
                throw py::value_error("an expert is not on this rank");
            }
            const bool counts_here = in.weight[pair] != 0.0f;
            expert_of_pair.push_back(counts_here ? expert : -1);
            if (counts_here) {
                ++counts[expert];
                ++counted;
            }
        }
    }
    std::vector<int64_t> next(local_experts);  // where each expert's next pair goes
    for (int64_t expert = 0, begin = 0; expert < local_experts; ++expert) {
        next[expert] = begin;
        begin += counts[expert];
    }
    if (per_expert) width = 1;
    Fresh<int64_t> row_of_pair(counted), gather(per_expert ? pairs : rows, width);
    Fresh<float> weight(counted);
    std::fill_n(gather.data, (per_expert ? pairs : rows) * width, -1);
    py::ssize_t row = 0, pair = 0;
    for (const Dispatched& segment : segments) {
        const auto in = columns_of(segment);
        const py::ssize_t begin = pair;
        for (py::ssize_t i = 0; i < segment.rows; ++i, ++row) {
            for (py::ssize_t j = 0; j < in.fanout[i]; ++j, ++pair) {
                if (expert_of_pair[pair] < 0) continue;
                const int64_t place = next[expert_of_pair[pair]]++;
                row_of_pair[place] = row;
                weight[place] = in.weight[pair - begin];
                gather[per_expert ? pair : row * width + j] = place;
            }
        }
    }
    py::list back;
    for (size_t first = 0; first < segments.size();) {
        size_t last = first + 1;
        while (last < segments.size() && segments[last].source == segments[first].source) ++last;
        back.append(way_back(segments, first, last, per_expert));
        first = last;
    }
    return py::make_tuple(row_of_pair.array, weight.array, counts.array, gather.array, back);
}

}  // namespace columns
