// The Python module `asyncmoe.native._columns`.
#include <pybind11/pybind11.h>

namespace py = pybind11;

PYBIND11_MODULE(_columns, m) { m.doc() = "Index columns of parcels and tables."; }
