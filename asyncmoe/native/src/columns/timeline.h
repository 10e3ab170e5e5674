// Virtual time: the compiled twin of `PlainLoop` in asyncmoe/virtual/plainloop.py.
#pragma once

#include "lane.h"

namespace columns {

struct Timeline {
    // Something due at a time; equal times go by number.
    struct Timer {
        double when_s;
        uint64_t number;
        Due due;

        bool operator<(const Timer& other) const {  // for a heap with the earliest on top
            return when_s > other.when_s || (when_s == other.when_s && number > other.number);
        }
    };

    double now_s = 0, slack_s = 0;
    long long events = 0;
    bool stopping = false;    // asyncio's own
    PyObject* self = nullptr;  // the loop that this is
    py::object on_event;       // None: nobody watches
    py::object variable, draw;  // where contexts have their lane; the seeded choice, or None
    std::vector<Ref<Lane>> lanes;  // all; the first belongs to no rank
    Ring<Lane*> turns;             // ready lanes, each once
    std::vector<Timer> timers;     // a heap
    uint64_t number = 0;           // of the last timer
    long long dropped = 0;         // cancelled timers in `timers`

    ~Timeline() { clear(); }

    const Ref<Lane>& lane(py::handle name, py::handle costs);
    // The lane of a context; null: of the present one.
    Lane& lane_of(PyObject* context);
    // Takes what is due at a time; one that is past counts as now.
    void at(double when_s, Due due) {
        timers.push_back({when_s, ++number, due});
        std::push_heap(timers.begin(), timers.end());
    }
    // Takes what goes behind all that is ready in a lane.
    void ready(Lane& lane, Due due);
    void note_cancelled();
    // Raises RuntimeError for a timeline that was made alone, and not as part of a loop.
    void check_set_up() const {
        if (lanes.empty()) throw std::runtime_error("this timeline is no loop");
    }
    // Until `stopping`. Raises what no callback may keep to itself, and Standstill.
    void run();

    int visit(visitproc visit, void* arg);
    void clear();

  private:
    bool take_out();
    void turn(Lane& lane);
    void call(Lane& lane, const Due& due);
    void report(py::handle callback, py::handle handle);
};

void bind_timeline(py::module_& m);

}  // namespace columns
