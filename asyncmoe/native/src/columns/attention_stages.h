// Attention batches between their queue and their parcels: the compiled twin of `AttentionStages`
// in asyncmoe/attentionstages.py, for batches that go on as a whole.
#pragma once

#include <memory>
#include <vector>

#include "departure.h"
#include "intake.h"

namespace columns {

class AttentionStages {
  public:
    // `stages`: a Python `AttentionStages` with a `Departure`.
    explicit AttentionStages(const py::object& stages);

    bool has(int64_t stage) const {
        return stage >= 0 && stage < static_cast<int64_t>(stages_.size()) && stages_[stage].number;
    }
    // An `AttentionStep` of up to `max_rows` rows. The queue of `stage` must not be empty.
    py::object prepare(int64_t stage, int64_t max_rows) const;
    // The device is done with a step. False if nothing has happened: some rows go no further.
    bool finish(PyObject* step, PyObject* result) const;

    static bool is_step(PyObject* object);
    // Of an `AttentionStep`.
    static int64_t stage_of(PyObject* step);
    // Of one whose rows were gathered by compiled code.
    static int64_t rows_of(PyObject* step);

    template <typename F>
    void each_reference(F visit) const {
        for (const py::object* each : {&model_, &table_, &cache_, &router_, &pool_}) visit(*each);
    }

  private:
    struct Stage {
        py::object number, layer;  // null: no attention stage
    };

    const std::shared_ptr<Queues> queues_;
    const std::shared_ptr<Departure> departure_;
    const std::shared_ptr<Books> books_;
    const std::shared_ptr<Homecoming> homecoming_;
    std::vector<Stage> stages_;
    int64_t last_layer_ = -1;  // behind which rows may end
    const py::object model_, table_, cache_, router_, pool_, request_ids_, tokens_, no_tokens_;
};

}  // namespace columns
