// What a loop and its compute thread hand each other: work one way, its outcome the other; the
// compiled twin of `PlainHandover` in asyncmoe/devices/handover.py.
//
// The loop is woken by the very last thing that the thread does for a piece of work, without the
// GIL: a thread that were woken earlier, on the same core maybe, would have to wait for the GIL
// again, and both would be put to sleep and woken twice more for each batch.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "boxed.h"

namespace columns {

class Handover {
  public:
    // On the loop. `spent` is what earlier work has left: it ends on the compute thread, where
    // freeing memory, which takes time that grows with rows, is in nobody's way.
    void submit(py::object work, py::object done, py::object spent);
    // The compute thread writes to `fd` when there is an outcome, and the loop then reads from
    // `read_fd` and calls `deliver`. Both are non-blocking; once this has returned, the ones before
    // are not used any more.
    void signal_to(int fd, int read_fd);
    void deliver();
    // `serve` returns once all that was submitted before is done.
    void end();

    // On the compute thread.
    void serve();

    double busy_s() const { return busy_s_; }

    int visit(visitproc visit, void* arg);
    void clear();

  private:
    struct Work {
        py::object work, done, spent;
    };
    struct Outcome {
        py::object done, result, error;
        double compute_s;
    };

    // Waits for work, without the GIL, after telling the loop of an outcome if there is one.
    bool await_work(bool tell);
    void compute(Work& work);
    void tell_loop();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Work> works_;  // changed with the GIL and the mutex
    bool ending_ = false;
    std::deque<Outcome> outcomes_;  // of the GIL
    std::mutex telling_;
    int fd_ = -1;  // of `telling_`
    int read_fd_ = -1;
    std::atomic<double> busy_s_{0};
};

// A function of work and what is called then: `submit` with nothing spent.
struct Submitting {
    py::object operator()(PyObject* const* arguments) const;

    Ref<Handover> handover;
};

void bind_handover(py::module_& m);

}  // namespace columns
