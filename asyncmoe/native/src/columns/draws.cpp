// Draws that are functions of a row's key: made-up expert choices.
#include "draws.h"

#include <algorithm>

namespace columns {
namespace {

constexpr uint64_t kStep = 0x9E3779B97F4A7C15, kRequest = 0xD1342543DE82EF95,
                   kPosition = 0x2545F4914F6CDD1D;
constexpr py::ssize_t kLonger = 4;  // draws per value before what is left is drawn by its weights

uint64_t mixed(uint64_t bits) {
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
    return bits ^ (bits >> 31);
}

struct Alias {
    Column<const uint32_t> limit;
    Column<const int64_t> other;
    Column<const double> weights;

    int64_t operator()(uint32_t bits) const {
        const uint64_t scaled = static_cast<uint64_t>(bits) * static_cast<uint64_t>(limit.size);
        const auto place = static_cast<py::ssize_t>(scaled >> 32);
        return static_cast<uint32_t>(scaled) <= limit[place] ? place : other[place];
    }

    // The value at `share` of the weights of all values but those chosen.
    int64_t without(const int64_t* begin, const int64_t* end, double share) const {
        double sum = 0;
        for (py::ssize_t i = 0; i < weights.size; ++i) {
            sum += std::find(begin, end, i) == end ? weights[i] : 0.0;
        }
        const double target = share * sum;
        double passed = 0;
        for (py::ssize_t i = 0; i < weights.size; ++i) {
            passed += std::find(begin, end, i) == end ? weights[i] : 0.0;
            if (passed > target) return i;
        }
        return 0;
    }
};

void draw_row(const Alias& alias, uint64_t key, py::ssize_t count, int64_t* chosen) {
    py::ssize_t found = 0;
    uint64_t bits = 0;
    for (py::ssize_t draw = 0; draw < kLonger * count && found < count; ++draw) {
        bits = draw % 2 ? bits >> 32 : mixed(key + (draw / 2 + 1) * kStep);
        const int64_t value = alias(static_cast<uint32_t>(bits));
        if (std::find(chosen, chosen + found, value) == chosen + found) chosen[found++] = value;
    }
    for (; found < count; ++found) {
        const uint64_t step = static_cast<uint64_t>(kLonger * count + found + 1);
        const double share = static_cast<double>(mixed(key + step * kStep) >> 11) * 0x1p-53;
        chosen[found] = alias.without(chosen, chosen + found, share);
    }
}

}  // namespace

py::array draw_distinct(uint64_t start, py::handle request_ids, py::handle positions_array,
                        py::handle limit, py::handle other, py::handle weights,
                        py::ssize_t count) {
    const auto requests = column<int64_t>(request_ids, "request_ids");
    const auto positions = column<int64_t>(positions_array, "positions");
    const Alias alias{column<uint32_t>(limit, "limit"), column<int64_t>(other, "other"),
                      column<double>(weights, "weights")};
    check_size(positions.size, requests.size, "positions");
    check_size(alias.other.size, alias.limit.size, "other");
    check_size(alias.weights.size, alias.limit.size, "weights");
    if (count < 1 || count > alias.limit.size) throw py::value_error("no so many values");
    Fresh<int64_t> chosen(requests.size, count);
    for (py::ssize_t row = 0; row < requests.size; ++row) {
        const uint64_t key = static_cast<uint64_t>(requests[row]) * kRequest +
                             static_cast<uint64_t>(positions[row]) * kPosition + start;
        draw_row(alias, mixed(key), count, chosen.data + row * count);
    }
    return chosen.array;
}

}  // namespace columns
