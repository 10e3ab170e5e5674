// Products in Python: layers whose weights are packed.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "experts.h"
#include "linear.h"
#include "pack.h"

namespace py = pybind11;

namespace asyncmoe {
namespace {

using Address = uintptr_t;

template <class T>
const T* at(Address address) {
    return reinterpret_cast<const T*>(address);
}

// Weights of bfloat16 take rows of bfloat16: some CPUs multiply the pairs as they are.
void check_dtypes(int storage, bool bf16) {
    if ((storage == 1 && !bf16) || (storage == 0 && bf16))
        throw std::invalid_argument("weights and rows are not of the same dtype");
}

Packed packed(int storage, Address data, Address scales, int64_t columns, int64_t inputs) {
    if (storage < 0 || storage > 2 || columns < 1 || inputs < 1)
        throw std::invalid_argument("no such storage or shape of weights");
    return {static_cast<Storage>(storage), at<char>(data), at<float>(scales), columns, inputs};
}

Activation activation_of(const std::string& name) {
    if (name == "silu") return Activation::silu;
    if (name == "relu") return Activation::relu;
    if (name == "gelu") return Activation::gelu;
    if (name == "gelu_pytorch_tanh") return Activation::gelu_tanh;
    throw std::invalid_argument("no compiled activation is called " + name);
}

}  // namespace
}  // namespace asyncmoe

void bind_linear(py::module_& m) {
    using namespace asyncmoe;
    using Unlocked = py::call_guard<py::gil_scoped_release>;
    m.def("packed_bytes",
          [](int storage, int64_t columns, int64_t inputs) {
              return packed(storage, 0, 0, columns, inputs).bytes();
          },
          py::arg("storage"), py::arg("columns"), py::arg("inputs"),
          "Bytes of a packed weight. Storage: 0 float32, 1 bfloat16, 2 int8.");
    m.def("pack",
          [](Address weight, int64_t columns, int64_t inputs, int storage, Address out,
             int64_t first, int64_t step) {
              packed(storage, out, 0, columns, inputs);  // checks
              pack(at<void>(weight), columns, inputs, static_cast<Storage>(storage),
                   reinterpret_cast<void*>(out), first, step);
          },
          py::arg("weight"), py::arg("columns"), py::arg("inputs"), py::arg("storage"),
          py::arg("out"), py::arg("first") = 0, py::arg("step") = 1, Unlocked(),
          "weight [columns, inputs] -> panels of 16 columns; panel i becomes first + i * step.");
    m.def("gated",
          [](const std::string& activation, bool bf16, Address x, int64_t rows, int64_t width,
             Address out) {
              gated(activation_of(activation), bf16, at<void>(x), rows, width,
                    reinterpret_cast<void*>(out));
          },
          py::arg("activation"), py::arg("bf16"), py::arg("x"), py::arg("rows"), py::arg("width"),
          py::arg("out"), Unlocked(), "x [rows, 2 * width] -> act(gate) * up [rows, width].");

    py::class_<LinearLayer>(m, "Linear", "A layer whose packed weights the caller keeps alive.")
        .def(py::init([](int storage, Address weight, Address scales, Address bias,
                         int64_t columns, int64_t inputs, bool bf16_in, bool bf16_out, bool round) {
                 check_dtypes(storage, bf16_in);
                 return LinearLayer{packed(storage, weight, scales, columns, inputs),
                                    at<float>(bias), bf16_in, bf16_out, round};
             }),
             py::arg("storage"), py::arg("weight"), py::arg("scales"), py::arg("bias"),
             py::arg("columns"), py::arg("inputs"), py::arg("bf16_in"), py::arg("bf16_out"),
             py::arg("round"))
        .def("__call__",
             [](const LinearLayer& layer, Address x, int64_t rows, int64_t stride, Address out) {
                 linear(layer, at<void>(x), rows, stride, reinterpret_cast<void*>(out));
             },
             py::arg("x"), py::arg("rows"), py::arg("stride"), py::arg("out"), Unlocked(),
             "x [rows, inputs], `stride` elements from row to row -> out [rows, columns].");

    py::class_<ExpertsLayer>(m, "Experts", "A layer whose packed weights the caller keeps alive.")
        .def(py::init([](int storage, Address gate_up, Address gate_up_scales, Address down,
                         Address down_scales, int64_t count, int64_t hidden, int64_t width,
                         const std::string& activation, bool bf16, bool round_products) {
                 check_dtypes(storage, bf16);
                 const int64_t panels = (width + kPanel - 1) / kPanel;
                 return ExpertsLayer{
                     packed(storage, gate_up, gate_up_scales, 2 * panels * kPanel, hidden),
                     packed(storage, down, down_scales, hidden, width),
                     count, activation_of(activation), bf16, round_products};
             }),
             py::arg("storage"), py::arg("gate_up"), py::arg("gate_up_scales"), py::arg("down"),
             py::arg("down_scales"), py::arg("experts"), py::arg("hidden"), py::arg("width"),
             py::arg("activation"), py::arg("bf16"), py::arg("round_products"))
        .def("__call__",
             [](const ExpertsLayer& layer, Address x, int64_t rows, int64_t stride, int64_t pairs,
                Address row, Address weight, Address counts, Address gather, int64_t out_rows,
                int64_t gather_width, Address out) {
                 experts(layer, at<void>(x), rows, stride,
                         {pairs, at<int64_t>(row), at<float>(weight), at<int64_t>(counts),
                          at<int64_t>(gather), out_rows, gather_width},
                         nullptr, reinterpret_cast<void*>(out));
             },
             py::arg("x"), py::arg("rows"), py::arg("stride"), py::arg("pairs"), py::arg("row"),
             py::arg("weight"), py::arg("counts"), py::arg("gather"), py::arg("out_rows"),
             py::arg("gather_width"), py::arg("out"), Unlocked(),
             "x [rows, hidden] and pairs sorted by expert -> out [out_rows, hidden].")
        .def("routed",
             [](const ExpertsLayer& layer, Address x, int64_t rows, int64_t stride, Address experts,
                Address weights, int64_t k, Address local, int64_t ids, Address out) {
                 routed_experts(layer, at<void>(x), rows, stride,
                                {at<int64_t>(experts), at<float>(weights), k, at<int64_t>(local),
                                 ids},
                                /*all_here=*/true, nullptr, reinterpret_cast<void*>(out));
             },
             py::arg("x"), py::arg("rows"), py::arg("stride"), py::arg("experts"),
             py::arg("weights"), py::arg("k"), py::arg("local"), py::arg("ids"), py::arg("out"),
             Unlocked(), "x [rows, hidden] and k experts of each row -> out [rows, hidden].");
}
