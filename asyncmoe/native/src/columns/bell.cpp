#include "bell.h"

#include <memory>

#include "collected.h"

namespace columns {

void bind_bell(py::module_& m) {
    py::class_<Bell, std::shared_ptr<Bell>>(m, "Bell", collected<Bell>())
        .def(py::init<py::object, py::object, py::object, int64_t>())
        .def("ring", &Bell::ring)
        .def_readwrite("wanted", &Bell::wanted)
        .def_property_readonly(
            "wanted_at", [](const Bell& bell) { return reinterpret_cast<uintptr_t>(&bell.wanted); })
        .def_readwrite("rung", &Bell::rung)
        .def_readwrite("mute", &Bell::mute);
}

}  // namespace columns
