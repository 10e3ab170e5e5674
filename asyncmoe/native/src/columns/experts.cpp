// The pairs of an expert batch, sorted by local expert, and the columns of its way back.
#include "experts.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "block.h"

namespace columns {
namespace {

struct Segment {
    int64_t source;
    py::ssize_t rows, pairs;
    std::unique_ptr<Bytes> block;

    explicit Segment(py::handle parcel) {
        const auto fields = py::cast<py::tuple>(parcel);
        source = fields[0].cast<int64_t>();
        rows = fields[1].cast<py::ssize_t>();
        pairs = fields[2].cast<py::ssize_t>();
        block = std::make_unique<Bytes>(fields[3]);
        if (!is_dispatch(block->size(), rows, pairs)) {
            throw py::value_error("a block does not fit its rows and pairs");
        }
    }

    Dispatch<const uint8_t> columns() const { return {block->data(), rows, pairs}; }
};

// Writes the way back of consecutive segments of one home: [first, last).
py::tuple way_back(const std::vector<Segment>& segments, size_t first, size_t last,
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
        const auto in = segments[i].columns();
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

py::tuple expert_batch(const py::list& parcels, py::handle local_array, py::ssize_t local_experts,
                       bool per_expert) {
    const auto local = column<int64_t>(local_array, "local");
    std::vector<Segment> segments;
    py::ssize_t rows = 0, pairs = 0, width = 1;
    for (const py::handle parcel : parcels) {
        segments.emplace_back(parcel);
        rows += segments.back().rows;
        pairs += segments.back().pairs;
    }
    Fresh<int64_t> counts(local_experts);
    std::fill_n(counts.data, local_experts, 0);
    std::vector<int64_t> expert_of_pair;  // -1 for a pair of weight 0, which adds nothing
    expert_of_pair.reserve(pairs);
    py::ssize_t counted = 0;
    for (const Segment& segment : segments) {
        const auto in = segment.columns();
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
    for (const Segment& segment : segments) {
        const auto in = segment.columns();
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
