// When what is put on a modelled link comes out of it: the compiled twin of
// transports/model_way.py, where the rules stand.
#pragma once

#include "boxed.h"

namespace columns {

// When what ranks share is free. Seconds.
struct Nics {
    std::vector<double> out_s, in_s, local_s;
    std::vector<std::pair<double, double>> idle_s;

    int visit(visitproc, void*) { return 0; }
    void clear() {}
};

struct Way {
    struct Crossing {
        double first_s, last_s, due_s;
        bool is_due;  // else `enter` tells, at `first_s`
    };

    Ref<Nics> nics;
    double* exit_s = nullptr;  // when what it leaves by is free
    int64_t into = -1;         // the NIC at the other end, if there is one to wait for
    double byte_s = 0, latency_s = 0, near_s = 0, jitter_s = 0;
    py::object random, at_source, at_target;  // null or None: there is none
    double sent_bytes = 0;

    Crossing put(double now_s, double begin_s, double nbytes);
    double enter(double first_s, double last_s, double nbytes);

    int visit(visitproc visit, void* arg);
    void clear() { const py::object a = std::move(at_source), b = std::move(at_target); }
};

void bind_model_way(py::module_& m);

}  // namespace columns
