// What an executor does between two pieces of device work: the compiled twin of `Executor._pump`
// and `Executor._done` in asyncmoe/executor.py, for what is as usual there.
#pragma once

#include <memory>
#include <vector>

#include "bell.h"
#include "boxed.h"
#include "queues.h"

namespace columns {

struct Turn {
    // `executor`: an `Executor` whose rule is work-conserving and not synchronous. It does itself
    // whatever is not as usual. `self`: what this is the value of.
    void init(py::handle self, py::object executor, py::object policy, py::object stages);

    // The bell has rung.
    void hear();
    // The device is done with the batch that it was given first.
    void done(PyObject* result, PyObject* error, PyObject* compute_s);
    // Nothing is done any more, and the stages are let go.
    void close();

    int visit(visitproc visit, void* arg);
    void clear();

    std::shared_ptr<Bell> bell;  // of the executor; to be set

  private:
    struct Choice {
        enum { kRun, kWait, kAsk } what;  // kAsk: the executor
        int64_t stage = -1;
    };
    struct Stage {
        py::object times;  // `KindTimes`
        bool travels;      // whether a batch of it may begin a passage
        int64_t max_rows, min_rows;
        double linger_s;
    };

    template <typename F>
    void attempt(F work);
    void fill();
    Choice choose() const;
    py::object prepare(int64_t stage);
    void finish(const py::object& step, PyObject* result, PyObject* compute_s);
    bool computes() const { return PyObject_Size(running_.ptr()) != 0; }
    bool is_closed() const { return closed_ || !bell; }

    py::object executor_, stages_, running_, after_, append_, popleft_, executed_, submit_, ender_,
        clock_, now_s_;
    std::shared_ptr<Queues> queues_;
    std::vector<Stage> of_stage_;
    int64_t depth_ = 0;
    bool closed_ = false;
};

void bind_turn(py::module_& m);

}  // namespace columns
