// The choice of the instruction set, in Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "selfcheck.h"

namespace py = pybind11;

namespace asyncmoe {
namespace {

std::vector<Isa>& isas() {
    static std::vector<Isa> usable;
    return usable;
}

// Looks for wrong ones once, when the module is imported, and takes the best of the others.
void choose_isa() {
    std::vector<std::string> wrong;
    isas() = usable_isas(wrong);
    isa_in_use() = isas().back();
    for (const std::string& name : wrong)
        py::module_::import("logging").attr("getLogger")("asyncmoe.native").attr("warning")(
            "compiled kernels for %s give wrong products on this machine and are left out", name);
}

void use_isa(const std::string& name) {
    for (const Isa isa : isas())
        if (name == isa_name(isa)) {
            isa_in_use() = isa;
            return;
        }
    throw std::invalid_argument(name + " is not an instruction set that works here");
}

std::vector<std::string> isa_names() {
    std::vector<std::string> names;
    for (const Isa isa : isas()) names.push_back(isa_name(isa));
    return names;
}

}  // namespace
}  // namespace asyncmoe

void bind_isa(py::module_& m) {
    using namespace asyncmoe;
    choose_isa();
    m.def("isa", [] { return isa_name(isa()); }, "The instruction set that kernels use.");
    m.def("isas", &isa_names, "Those that work here, the best one last.");
    m.def("use_isa", &use_isa, py::arg("name"),
          "Let kernels use this one, for tests. Raises ValueError if it does not work here.");
}
