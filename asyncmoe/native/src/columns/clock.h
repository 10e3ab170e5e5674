// Clocks. `time.thread_time`, by which ranks count, is read without calling it.
#pragma once

#include <time.h>

#include <chrono>
#include <utility>

#include "names.h"
#include "numbers.h"

namespace columns {

// That of `time.perf_counter`.
inline double monotonic_s() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(since).count();
}

class Clock {
  public:
    explicit Clock(py::object clock = py::none())
        : clock_(std::move(clock)),
          is_thread_time_(clock_.is(py::module_::import("time").attr("thread_time"))) {}

    // Now, in seconds. Raises what the clock raises.
    double operator()() const {
        timespec now;
        if (is_thread_time_ && clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) == 0) {
            return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
        }
        return real(call(clock_).ptr());
    }

    py::object& object() { return clock_; }
    const py::object& object() const { return clock_; }

  private:
    py::object clock_;
    bool is_thread_time_;
};

}  // namespace columns
