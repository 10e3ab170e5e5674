#include "merge.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "bf16.h"
#include "isa.h"
#include "pool.h"

#define ASYNCMOE_SOURCE "merge_rows.isa.h"
#include "each_isa.h"

namespace py = pybind11;

namespace asyncmoe {
namespace {

constexpr int64_t kTaskElements = 1 << 14;  // some microseconds of work

template <class T>
void merge_rows(const MergeCall& call) {
    const int64_t tasks = (call.rows + call.rows_per_task - 1) / call.rows_per_task;
    Pool::mine().run(static_cast<int>(tasks),
                     [&](int task) { ASYNCMOE_ON_ISA(merge_task<T>, call, task); });
}

}  // namespace

void merge(MergeCall call, bool bf16) {
    for (int64_t i = 0; i < call.rows; ++i) {
        if (call.slots[i] < 0 || call.slots[i] >= call.table_slots)
            throw std::out_of_range("a slot that the token table does not have");
        if (call.counts[i] > call.max_parts)
            throw std::out_of_range("more parts than a slot has");
    }
    call.rows_per_task =
        static_cast<int>(std::max<int64_t>(1, kTaskElements / std::max(call.width, 1)));
    if (bf16) merge_rows<Bf16>(call);
    else merge_rows<float>(call);
}

}  // namespace asyncmoe

void bind_merge(py::module_& m) {
    m.def("merge",
          [](bool bf16, uintptr_t residual, uintptr_t parts, uintptr_t slots, uintptr_t counts,
             uintptr_t out, int64_t rows, int64_t table_slots, int max_parts, int width) {
              asyncmoe::merge({reinterpret_cast<const void*>(residual),
                               reinterpret_cast<const void*>(parts),
                               reinterpret_cast<const int64_t*>(slots),
                               reinterpret_cast<const uint8_t*>(counts),
                               reinterpret_cast<void*>(out), rows, table_slots, max_parts, width,
                               0},
                              bf16);
          },
          py::arg("bf16"), py::arg("residual"), py::arg("parts"), py::arg("slots"),
          py::arg("counts"), py::arg("out"), py::arg("rows"), py::arg("table_slots"),
          py::arg("max_parts"), py::arg("width"), py::call_guard<py::gil_scoped_release>(),
          "Residual plus parts of these slots, in part order in float32: out [rows, width].");
}
