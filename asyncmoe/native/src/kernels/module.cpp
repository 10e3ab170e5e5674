// The Python module `asyncmoe.native._kernels`.
//
// Arrays are passed as addresses (`Tensor.data_ptr()`): a conversion per argument would cost more
// than a small kernel. The Python wrappers in `asyncmoe/models/layers` are the only callers; they
// check shapes, dtypes and contiguity and keep the memory alive. Kernels run without the GIL.
#include <pybind11/pybind11.h>

#include "pool.h"

namespace py = pybind11;

void bind_norm(py::module_& m);
void bind_merge(py::module_& m);
void bind_attention(py::module_& m);
void bind_router(py::module_& m);
void bind_layers(py::module_& m);
void bind_isa(py::module_& m);
void bind_linear(py::module_& m);

PYBIND11_MODULE(_kernels, m) {
    m.def("set_threads", [](int threads) { asyncmoe::Pool::mine().resize(threads); },
          py::arg("threads"), py::call_guard<py::gil_scoped_release>(),
          "Threads that kernels called on this thread use, this one included.");
    bind_isa(m);
    bind_linear(m);
    bind_norm(m);
    bind_merge(m);
    bind_attention(m);
    bind_router(m);
    bind_layers(m);
}
