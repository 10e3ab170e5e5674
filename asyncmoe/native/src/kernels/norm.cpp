#include "norm.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>

#include "bf16.h"
#include "isa.h"
#include "pool.h"

#define ASYNCMOE_SOURCE "norm_rows.isa.h"
#include "each_isa.h"

namespace py = pybind11;

namespace asyncmoe {
namespace {

constexpr int64_t kTaskElements = 1 << 13;  // some microseconds of work

template <class T>
void norm_rows(const NormCall& call) {
    const int64_t tasks = (call.rows + call.rows_per_task - 1) / call.rows_per_task;
    Pool::mine().run(static_cast<int>(tasks),
                     [&](int task) { ASYNCMOE_ON_ISA(norm_task<T>, call, task); });
}

}  // namespace

void norm(NormCall call, bool bf16) {
    call.rows_per_task =
        static_cast<int>(std::max<int64_t>(1, kTaskElements / std::max(call.width, 1)));
    if (bf16) norm_rows<Bf16>(call);
    else norm_rows<float>(call);
}

}  // namespace asyncmoe

void bind_norm(py::module_& m) {
    m.def("norm",
          [](bool bf16, uintptr_t x, uintptr_t y, uintptr_t sum, uintptr_t weight, uintptr_t out,
             int64_t rows, int width, float eps) {
              asyncmoe::norm({reinterpret_cast<const void*>(x), reinterpret_cast<const void*>(y),
                              reinterpret_cast<void*>(sum), reinterpret_cast<const void*>(weight),
                              reinterpret_cast<void*>(out), rows, width, eps, 0},
                             bf16);
          },
          py::arg("bf16"), py::arg("x"), py::arg("y"), py::arg("sum"), py::arg("weight"),
          py::arg("out"), py::arg("rows"), py::arg("width"), py::arg("eps"),
          py::call_guard<py::gil_scoped_release>(),
          "sum = x + y (if y is not 0), out = weight * rms_norm(sum or x); all [rows, width].");
}
