#include "router.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bf16.h"
#include "isa.h"
#include "pool.h"
#include "scratch.h"

namespace asyncmoe {

constexpr float kLog2e = 1.44269504f;

}  // namespace asyncmoe

#define ASYNCMOE_SOURCE "router_rows.isa.h"
#include "each_isa.h"

namespace py = pybind11;

namespace asyncmoe {
namespace {

constexpr int64_t kTaskRows = 6;
constexpr int64_t kSerialWork = 1 << 17;  // multiply-adds that one thread does as fast as two

using Share = std::pair<float, int64_t>;

bool comes_first(const Share& a, const Share& b) {
    return (std::isnan(a.first) && !std::isnan(b.first)) || a.first > b.first;
}

// The k largest shares in descending order. Equal ones are frequent, since logits have few bits;
// they fall as in `torch.topk`, which runs these algorithms of the standard library.
void choose(std::vector<Share>& shares, int top_k) {
    const auto begin = shares.begin(), kth = begin + top_k;
    if (int64_t{top_k} * 64 <= static_cast<int64_t>(shares.size())) {
        std::partial_sort(begin, kth, shares.end(), comes_first);
    } else {
        std::nth_element(begin, kth - 1, shares.end(), comes_first);
        std::sort(begin, kth - 1, comes_first);
    }
}

float rounded_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (std::isnan(value)) return value;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    std::memcpy(&value, &bits, sizeof bits);
    return value;
}

void take_best(const RouteCall& call, int64_t row, const float* probabilities) {
    thread_local std::vector<Share> shares;
    shares.resize(call.experts);
    for (int i = 0; i < call.experts; ++i) shares[i] = {probabilities[i], i};
    choose(shares, call.top_k);
    float total = 0;
    for (int i = 0; i < call.top_k; ++i) total += shares[i].first;
    for (int i = 0; i < call.top_k; ++i) {
        const float weight = call.renormalise ? shares[i].first / total : shares[i].first;
        call.chosen[row * call.top_k + i] = shares[i].second;
        call.weights[row * call.top_k + i] = call.round ? rounded_to_bf16(weight) : weight;
    }
}

template <class T>
void route(const RouteCall& call, int64_t rows) {
    const auto body = [&](int task) {
        thread_local Scratch memory;
        const int64_t first = task * kTaskRows, end = std::min(first + kTaskRows, rows);
        float* x = memory.take<float>(kTaskRows * (call.hidden + call.columns));
        float* scores = x + kTaskRows * call.hidden;
        ASYNCMOE_ON_ISA(route_rows<T>, call, first, end, x, scores);
        for (int64_t row = first; row < end; ++row)
            take_best(call, row, scores + (row - first) * call.columns);
    };
    const int tasks = static_cast<int>((rows + kTaskRows - 1) / kTaskRows);
    if (rows * call.hidden * call.columns < kSerialWork)
        for (int task = 0; task < tasks; ++task) body(task);
    else
        Pool::mine().run(tasks, body);
}

Router make_router(bool bf16, uintptr_t gate, uintptr_t bias, int hidden, int columns, int experts,
                   int top_k, bool renormalise, bool round) {
    if (hidden <= 0 || columns % 8 != 0 || experts > columns || top_k < 1 || top_k > experts)
        throw std::invalid_argument("router: hidden, columns, experts or top_k");
    return {{nullptr, reinterpret_cast<const float*>(gate), reinterpret_cast<const float*>(bias),
             hidden, columns, experts, top_k, renormalise, round, nullptr, nullptr},
            bf16};
}

}  // namespace

void Router::operator()(const void* x, int64_t rows, int64_t* chosen, float* weights) const {
    RouteCall full = call;
    full.x = x;
    full.chosen = chosen;
    full.weights = weights;
    if (bf16) route<Bf16>(full, rows);
    else route<float>(full, rows);
}

}  // namespace asyncmoe

void bind_router(py::module_& m) {
    using asyncmoe::Router;
    py::class_<Router>(m, "Router", "The gate of one layer and how its experts are chosen.")
        .def(py::init(&asyncmoe::make_router), py::arg("bf16"), py::arg("gate"), py::arg("bias"),
             py::arg("hidden"), py::arg("columns"), py::arg("experts"), py::arg("top_k"),
             py::arg("renormalise"), py::arg("round"))
        .def("__call__",
             [](const Router& router, uintptr_t x, int64_t rows, uintptr_t experts,
                uintptr_t weights) {
                 router(reinterpret_cast<const void*>(x), rows,
                        reinterpret_cast<int64_t*>(experts), reinterpret_cast<float*>(weights));
             },
             py::arg("x"), py::arg("rows"), py::arg("experts"), py::arg("weights"),
             py::call_guard<py::gil_scoped_release>(),
             "x [rows, hidden] -> experts int64 and weights float32, both [rows, top_k].");
}
