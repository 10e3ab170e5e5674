// What an executor does between two pieces of device work: the compiled twin of `Executor._pump`
// and `Executor._done` in asyncmoe/executor.py, for what is as usual there.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "attention_stages.h"
#include "bell.h"
#include "boxed.h"
#include "clock.h"
#include "company.h"
#include "expert_stages.h"
#include "queues.h"

namespace columns {

struct Turn {
    // `workings`: the `Workings` of an executor whose rule is work-conserving and not synchronous.
    // What is not as usual is left to it. `self`: what this is the value of.
    void init(py::handle self, const py::object& workings);

    // The bell has rung.
    void hear();
    // The device is done with the batch that it was given first.
    void done(PyObject* result, PyObject* error, PyObject* compute_s);
    // All batches go through the executor's stages from now on.
    void watch() {
        experts_.reset();
        attention_.reset();
    }
    // A passage has taken `rows` rows through `stages`, (stage, seconds) each; of the first of them
    // note was taken. See `Executor._passed`.
    void passed(const py::list& stages, int64_t rows);
    // Gives a batch to the device, with what the batches before have left, if that takes it.
    void submit(const py::object& step);
    // A batch of `rows` rows of `stage` is with the device.
    void note(int64_t stage, int64_t rows);
    // The rule hears now of the batches that it has not been told of.
    void tell();
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
        int kind;          // as in asyncmoe/stage.py
        int64_t max_rows;
    };

    template <typename F>
    void attempt(F work);
    void fill(double begin_s);
    Choice choose() const;
    py::object prepare(int64_t stage);
    void keep(const py::object& step, PyObject* result);
    double finish(const py::object& step, PyObject* result, PyObject* compute_s);
    bool computes() const { return length_of(running_) != 0; }
    bool is_full() const { return length_of(running_) >= depth_; }
    const Stage& stage_at(int64_t stage) const;
    bool is_closed() const { return closed_ || !bell; }

    py::object fill_, done_, fail_, travel_, look_again_;  // the executor's ways
    py::object stages_, running_, after_, append_, popleft_, submit_, ender_;
    py::object executed_;  // of the rule; None: it takes no note
    py::object spent_ = py::none();  // batches that are over, for the compute thread to free
    // Batches that the rule has not been told of: (stage, rows). It looks at them when it chooses.
    std::vector<std::pair<int64_t, int64_t>> untold_;
    Clock clock_, now_s_;
    std::shared_ptr<Queues> queues_;
    std::shared_ptr<const ExpertStages> experts_;  // null: `stages_` has them
    std::shared_ptr<const AttentionStages> attention_;  // likewise
    std::vector<Stage> of_stage_;
    py::object policy_;  // owns these
    Column<const int64_t> min_rows_{nullptr, 0};
    Column<const double> linger_s_{nullptr, 0};
    std::shared_ptr<Company> company_;  // null: minima stay as they are
    int64_t depth_ = 0;
    bool closed_ = false;
};

void bind_turn(py::module_& m);

}  // namespace columns
