// How a run's time divides among its callbacks: the compiled twin of `PlainStopwatch` in
// asyncmoe/virtual/meter.py.
#pragma once

#include "boxed.h"

namespace columns {

struct Stopwatch {
    py::object names;  // set of the qualified names of callbacks whose time counts
    double counted_s = 0, within_s = 0, begin_s = 0, last_s = 0;
    bool counts = false;

    // A callback begins, so the one before it is over.
    void begin(PyObject* callback);
    void close();

    int visit(visitproc visit, void* arg) {
        Py_VISIT(names.ptr());
        return 0;
    }
    void clear() {}
};

void bind_stopwatch(py::module_& m);

}  // namespace columns
