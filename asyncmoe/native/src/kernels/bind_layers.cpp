// Whole decoder layers, walks through them and marches: layers.h, walk.h, march.h.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "homelayer.h"
#include "layers.h"
#include "march.h"
#include "walk.h"

namespace py = pybind11;

namespace asyncmoe {
namespace {

// All layers of a model for one step of a walk after the other.
std::pair<int64_t, int64_t> walk_through(const Walk& walk, const Layers& layers, uintptr_t memory,
                                         uintptr_t x, int64_t steps) {
    const int64_t count = layers.count();
    if (count == 0 || walk.seconds_width != 2 * count + 1 ||
        walk.tongue.hidden() != layers.all[0].home.hidden() ||
        walk.tongue.bf16() != layers.all[0].home.bf16())
        throw std::invalid_argument("the layers do not fit the walk");
    const auto pass = [&](void* rows, double* seconds) {
        return layers.pass(walk.rows, rows, walk.positions, 0, count, at<const LayerMemory>(memory),
                           [&] { return walk.is_wanted(); }, rows, seconds);
    };
    Nobody nobody;
    const Walk::End end = walk.run(steps, count, at<void>(x), false, nobody, pass);
    return {end.layers, end.turn};
}

std::tuple<int64_t, int64_t, bool> march(
    const Walk& walk, const Layers& layers, uintptr_t memory, uintptr_t x, int64_t steps,
    int64_t number, int64_t rank, const std::vector<std::pair<uintptr_t, uintptr_t>>& halves,
    int64_t half_bytes, int64_t rows, uintptr_t owner, int64_t ids, uintptr_t broken,
    uintptr_t counts, uintptr_t seconds) {
    if (layers.count() == 0) throw std::invalid_argument("a march goes through layers");
    std::vector<Fellow> fellows;
    for (const auto& [mine, theirs] : halves)
        fellows.push_back({at<char>(mine), at<const char>(theirs)});
    const MarchForm form{rows, layers.all[0].row_bytes(), layers.all[0].top_k()};
    if (form.bytes() > half_bytes)
        throw std::invalid_argument("the memory for a march is too small");
    const Tally tally{at<int64_t>(counts), at<int64_t>(counts) + 3, at<double>(seconds),
                      at<double>(seconds) + 3};
    March made(number, rank, std::move(fellows), form, at<const uint16_t>(owner), ids,
               at<const unsigned char>(broken), tally);
    const Walk::End end =
        made.run(walk, layers, at<const LayerMemory>(memory), at<void>(x), steps);
    return {end.layers, end.turn, made.has_ended()};
}

Tongue make_tongue(uintptr_t embedding, int64_t vocab, uintptr_t norm, float norm_eps,
                   const LinearLayer& head) {
    if (head.bf16_out || head.weight.columns != vocab)
        throw std::invalid_argument("the head does not fit the embedding");
    return {at<const char>(embedding), at<const void>(norm), norm_eps, head};
}

Walk make_walk(const Tongue& tongue, const PagedRows& rows, uintptr_t positions,
               uintptr_t cache_index, uintptr_t context, uintptr_t ends, int64_t end_width,
               int64_t turns, uintptr_t tokens, uintptr_t bad, uintptr_t seconds,
               int64_t seconds_width, uintptr_t counts, uintptr_t wanted, int bell) {
    if (rows.rows != rows.segments || rows.decode_rows != rows.rows ||
        rows.cache_index != at<const int64_t>(cache_index) ||
        rows.context != at<const int64_t>(context))
        throw std::invalid_argument("the rows are no decode steps of these columns");
    if (turns < 2) throw std::invalid_argument("a walk keeps two steps at least");
    return {tongue, rows, at<int64_t>(positions), at<int64_t>(cache_index), at<int64_t>(context),
            at<const int64_t>(ends), end_width, turns, at<int64_t>(tokens), at<bool>(bad),
            at<double>(seconds), seconds_width, at<int64_t>(counts),
            at<const unsigned char>(wanted), bell};
}

}  // namespace
}  // namespace asyncmoe

void bind_layers(py::module_& m) {
    using namespace asyncmoe;
    m.def("likeliest",
          [](uintptr_t x, int64_t count) { return likeliest(at<const float>(x), count); },
          py::arg("x"), py::arg("count"), py::call_guard<py::gil_scoped_release>(),
          "The place of the first of the largest numbers; -1 if it is infinite or any is NaN.");
    py::class_<Tongue>(m, "Tongue", "Embedding, final norm and head.")
        .def(py::init(&make_tongue), py::arg("embedding"), py::arg("vocab"), py::arg("norm"),
             py::arg("norm_eps"), py::arg("head"));
    py::class_<Walk>(m, "Walk", "Decode steps of rows; their columns are brought up to date.")
        .def(py::init(&make_walk), py::arg("tongue"), py::arg("rows"), py::arg("positions"),
             py::arg("cache_index"), py::arg("context"), py::arg("ends"), py::arg("end_width"),
             py::arg("turns"), py::arg("tokens"), py::arg("bad"), py::arg("seconds"),
             py::arg("seconds_width"), py::arg("counts"), py::arg("wanted"), py::arg("bell"))
        .def("__call__", &walk_through, py::arg("layers"), py::arg("memory"), py::arg("x"),
             py::arg("steps"), py::call_guard<py::gil_scoped_release>(),
             "At most `steps` steps behind tokens [0]: layers that the last of them passed, and "
             "which tokens are its own. x: memory for [rows, hidden].");
    m.def("march", &march, py::arg("walk"), py::arg("layers"), py::arg("memory"), py::arg("x"),
          py::arg("steps"), py::arg("number"), py::arg("rank"), py::arg("halves"),
          py::arg("half_bytes"), py::arg("rows"), py::arg("owner"), py::arg("ids"), py::arg("broken"),
          py::arg("counts"), py::arg("seconds"), py::call_guard<py::gil_scoped_release>(),
          "Steps of a walk together with other ranks; see march.h. halves: by rank, the address of "
          "this rank's and of the other's. counts: int64 [2, 3] and seconds: float64 [4] of a tally. "
          "Returns what a walk does, and whether it ended as agreed.");
    py::class_<HomeLayer>(m, "HomeLayer", "Norm, attention, norm and router of one decoder layer.")
        .def(py::init([](uintptr_t norm, float norm_eps, const LinearLayer& qkv,
                         const AttentionKernel& attention, const LinearLayer& out,
                         uintptr_t router_norm, float router_norm_eps, const Router& router) {
                 const HomeLayer layer{at<const void>(norm), norm_eps, qkv, attention, out,
                                       at<const void>(router_norm), router_norm_eps, router};
                 layer.check();
                 return layer;
             }),
             py::arg("norm"), py::arg("norm_eps"), py::arg("qkv"), py::arg("attention"),
             py::arg("out"), py::arg("router_norm"), py::arg("router_norm_eps"), py::arg("router"))
        .def("__call__",
             [](const HomeLayer& layer, const PagedRows& rows, uintptr_t x, uintptr_t angle,
                uintptr_t keys, uintptr_t values, int64_t blocks, uintptr_t angles,
                int64_t angle_rows, uintptr_t residual, uintptr_t hidden, uintptr_t experts,
                uintptr_t weights) {
                 home_layer(
                     layer, rows, at<const void>(x), at<const int64_t>(angle),
                     {at<void>(keys), at<void>(values), blocks, at<const void>(angles), angle_rows},
                     {at<void>(residual), at<void>(hidden), at<int64_t>(experts),
                      at<float>(weights)});
             },
             py::arg("rows"), py::arg("x"), py::arg("angle"), py::arg("keys"), py::arg("values"),
             py::arg("blocks"), py::arg("angles"), py::arg("angle_rows"), py::arg("residual"),
             py::arg("hidden"), py::arg("experts"), py::arg("weights"),
             py::call_guard<py::gil_scoped_release>(),
             "x [rows, hidden] -> x + attention, its norm, the router's choice; writes K and V.");
    py::class_<Layers>(m, "Layers", "Consecutive decoder layers and their routed experts.")
        .def(py::init<>())
        .def("add", &Layers::add, py::arg("home"), py::arg("experts"))
        .def("__call__",
             [](const Layers& layers, const PagedRows& rows, uintptr_t x, uintptr_t angle,
                int64_t first, int64_t count, uintptr_t memory, const py::object& wanted,
                uintptr_t out, uintptr_t seconds) {
                 const auto is_wanted = [&] {
                     py::gil_scoped_acquire locked;
                     return static_cast<bool>(py::bool_(wanted()));
                 };
                 return layers.pass(rows, at<const void>(x), at<const int64_t>(angle), first, count,
                                    at<const LayerMemory>(memory), is_wanted, at<void>(out),
                                    at<double>(seconds));
             },
             py::arg("rows"), py::arg("x"), py::arg("angle"), py::arg("first"), py::arg("count"),
             py::arg("memory"), py::arg("wanted"), py::arg("out"), py::arg("seconds"),
             py::call_guard<py::gil_scoped_release>(),
             "x [rows, hidden] through `count` layers, or fewer if `wanted()`; returns how many.");
}
