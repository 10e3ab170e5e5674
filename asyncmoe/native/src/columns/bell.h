// Asking an executor to look at its queues: the compiled twin of asyncmoe/bell.py.
#pragma once

#include "names.h"

namespace columns {

class Bell {
  public:
    Bell(py::object call_soon, py::object hear, py::object running, int64_t enough)
        : call_soon_(std::move(call_soon)),
          hear_(std::move(hear)),
          running_(std::move(running)),
          enough_(enough) {}

    void ring() {
        wanted = true;
        if (rung || mute || length_of(running_) >= enough_) return;
        rung = true;
        call(call_soon_, hear_);
    }

    template <typename F>
    void each_reference(F visit) {
        visit(call_soon_);
        visit(hear_);
        visit(running_);
    }

    bool wanted = false, rung = false, mute = false;

  private:
    py::object call_soon_, hear_, running_;
    const int64_t enough_;
};

void bind_bell(py::module_& m);

}  // namespace columns
