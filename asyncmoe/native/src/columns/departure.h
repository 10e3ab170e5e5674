// What an attention batch leaves behind: the compiled twin of `Home.leave_attention` and
// `Dispatcher.dispatch`, for a batch of which nothing was cancelled and all rows go on.
#pragma once

#include <memory>

#include "clock.h"
#include "outboxes.h"
#include "queues.h"
#include "rows.h"

namespace columns {

class Departure {
  public:
    // `rank`: whose rows these are. `held_rows`: see `Receptor`. `wake` is called with chunks that
    // have left their stage, if others of their requests may wait behind them.
    Departure(std::shared_ptr<Books> books, std::shared_ptr<Outboxes> outboxes,
              std::shared_ptr<Queues> queues, int64_t rank, py::object held_rows,
              py::object now_s, py::object wake);

    // The rows go to expert stage `stage`; `parts` (uint8 [rows]) of each will come back, and
    // `parcels` are those of `Routed`. If it returns false, nothing has happened: some are dead.
    bool leave(py::handle gathered, const py::object& chunks, int64_t stage, py::handle parts,
               const py::list& parcels);

    template <typename F>
    void each_reference(F visit) {
        visit(now_s_.object());
        visit(wake_);
    }

  private:
    bool all_alive(const Gathered& rows) const;
    bool leave_stage(const Gathered& rows, const Column<const int64_t>& chunks, Number next);
    void expect(const Gathered& rows, Number stage, const Column<const uint8_t>& parts);

    const std::shared_ptr<Books> books_;
    const std::shared_ptr<Outboxes> outboxes_;
    const std::shared_ptr<Queues> queues_;
    const int64_t rank_;
    const py::object held_array_;
    const Column<int64_t> held_rows_;  // [ranks]
    Clock now_s_;
    py::object wake_;
};

void bind_departure(py::module_& m);

}  // namespace columns
