// Expert batches between their queue and their parcels: the compiled twin of `ExpertStages` in
// asyncmoe/expertstages.py.
#pragma once

#include <memory>
#include <vector>

#include "intake.h"

namespace columns {

class ExpertStages {
  public:
    // `stages`: a Python `ExpertStages` with compiled queues and outboxes.
    explicit ExpertStages(const py::object& stages);

    bool has(int64_t stage) const { return queues_->is_expert_stage(stage); }
    // An `ExpertStep` of up to `max_rows` rows. The queue of `stage` must not be empty.
    py::object prepare(int64_t stage, int64_t max_rows) const;
    // The device is done with a step that was prepared here.
    void finish(PyObject* step, const py::object& out) const;

    static bool is_step(PyObject* object);
    // Of an `ExpertStep`.
    static int64_t stage_of(PyObject* step);
    static int64_t rows_of(PyObject* step);

    template <typename F>
    void each_reference(F visit) const {
        visit(model_);
    }

  private:
    struct Stage {
        py::object number, layer, local, local_experts;  // null: no expert stage
    };

    const std::shared_ptr<Queues> queues_;
    const std::shared_ptr<Outboxes> outboxes_;
    std::vector<Stage> stages_;
    const py::object model_, per_expert_, held_array_;
    const Column<int64_t> held_rows_;       // [ranks]
    std::shared_ptr<Homecoming> homecoming_;  // null: home of nothing
};

}  // namespace columns
