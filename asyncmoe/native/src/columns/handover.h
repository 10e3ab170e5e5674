// What a loop and its compute thread hand each other: work one way, its outcome the other; the
// compiled twin of `PlainHandover` in asyncmoe/devices/handover.py.
//
// The loop is woken by the very last thing that the thread does for a piece of work, without the
// GIL. A loop that is woken earlier, on the same core maybe, would have to wait for the GIL
// again, and both would be put to sleep and woken twice more for each batch.
#pragma once

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
    // are not used any more, and outcomes of what was submitted before are nobody's.
    void signal_to(int fd, int read_fd);
    void deliver();
    // `take` finds nothing any more once all that was submitted before is done.
    void end();

    // On the compute thread: the next piece of work, which begins with that; None at the end. The
    // loop is told of the outcome before, and then waited for, without the GIL.
    PyObject* take();
    // What became of it.
    void tell(py::object result, py::object error);

    // In work, up to now.
    double busy_s() const;

    int visit(visitproc visit, void* arg);
    void clear();

  private:
    struct Work {
        py::object work, done, spent;
        int64_t era;
    };
    struct Outcome {
        py::object done, result, error;
        int64_t era;
        double compute_s;
    };

    // Whether there is work, for which it waits.
    bool await_work();
    void tell_loop();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Work> works_;  // changed with the GIL and the mutex
    bool ending_ = false;
    // All below are of the GIL, but for `fd_`.
    std::deque<Outcome> outcomes_;
    Outcome running_{};  // begun, or of no work
    int64_t era_ = 0;    // of the descriptors
    bool is_untold_ = false;
    std::mutex telling_;
    int fd_ = -1;  // of `telling_`
    int read_fd_ = -1;
    double busy_s_ = 0, began_s_ = 0;  // of work that is over; since when some runs, or 0
};

// A function of work and what is called then: `submit` with nothing spent.
struct Submitting {
    py::object operator()(PyObject* const* arguments) const;

    Ref<Handover> handover;
};

void bind_handover(py::module_& m);

}  // namespace columns
