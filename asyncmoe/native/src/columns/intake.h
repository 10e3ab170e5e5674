// What a rank takes in: the compiled twin of `Receptor.take` in asyncmoe/receptor.py and of
// `Home.take_in` in asyncmoe/home.py, for parcels that are as they should be.
#pragma once

#include <memory>
#include <vector>

#include "bell.h"
#include "books.h"
#include "clock.h"
#include "outboxes.h"
#include "queues.h"
#include "tokens.h"

namespace columns {

// Combine rows on their way into the token table, and the chunks that they complete.
class Homecoming {
  public:
    // `table`: a `TokenTable`, which is in the books. `see_to_arrivals` is called when rows whose
    // memory somebody waits for are still to be copied, and `look` when a stage has ended since
    // such rows came and there may still be some.
    Homecoming(py::object table, std::shared_ptr<Books> books, std::shared_ptr<Queues> queues,
               py::object now_s, py::object see_to_arrivals, py::object look);

    // `release` is for when the memory of its rows is read no more.
    void take_in(const PackedView& parcel, Release release);
    // A stage has ended: see `Arrivals.let_go`.
    void let_go();

    template <typename F>
    void each_reference(F visit) {
        visit(table_);
        visit(see_to_arrivals_);
        visit(look_);
        visit(now_s_.object());
        visit(arrived_);
        visit(copied_);
    }

  private:
    // The slots in `done` are complete: chunks that are so too join their queues.
    void complete(std::vector<Number>* done);
    // These rows are to be copied.
    void arrive(const PackedView& parcel, const Combine<const uint8_t>& in,
                const Accepted& accepted, const Release& release);

    py::object table_, see_to_arrivals_, look_;
    Clock now_s_;
    py::object arrived_, copied_;
    bool is_awaited_ = false;  // the memory of something that has arrived since `look_` was called
    const std::shared_ptr<Books> books_;
    const std::shared_ptr<Queues> queues_;
    const int64_t max_parts_;
    const bool has_columns_;
    std::vector<Number> done_;  // memory for the next time
};

// What other ranks send to one rank.
class Intake {
  public:
    // `receptor`: a `Receptor`. `other` gets all arrivals that are not plain; `failed` an error of
    // ours and the rank whose parcel it was about.
    Intake(py::object receptor, std::shared_ptr<Queues> queues, std::shared_ptr<Outboxes> outboxes,
           std::shared_ptr<Homecoming> homecoming, std::shared_ptr<Bell> bell, py::object other,
           py::object failed);

    void take(py::handle arrival);
    // The same for a parcel that no Python object stands for yet, with rows of `dtype` (code of
    // ours). If it returns false, nothing has happened: an arrival of it is to be made and taken.
    bool take(int64_t source, int dtype, PackedView parcel, Release release);

    // The one whose method `take` this is; null if it is something else.
    static std::shared_ptr<Intake> of(const py::object& callback);

    template <typename F>
    void each_reference(F visit) {
        for (py::object* each : {&other_, &failed_, &times_, &clock_.object(), &now_s_.object()}) {
            visit(*each);
        }
    }

    bool is_open = true;  // else all arrivals go to `other`

    // Of a stage: the local index of each expert of its layer.
    struct Local {
        py::object array;
        Column<const int64_t> column;
    };

  private:
    template <typename F>
    bool timed(int64_t source, F take_it);
    bool take_plain(py::handle arrival, int64_t source);
    bool take_plain(int64_t source, PackedView parcel, Release release);
    bool take_dispatch(int64_t source, PackedView parcel, Release release);

    const std::shared_ptr<Queues> queues_;
    const std::shared_ptr<Outboxes> outboxes_;
    const std::shared_ptr<Homecoming> homecoming_;  // null: home of nothing
    const std::shared_ptr<Bell> bell_;
    py::object other_, failed_, times_;
    Clock clock_, now_s_;
    const py::object dtype_;
    const int dtype_code_;
    const std::vector<Local> local_;       // of each stage; nothing for one without experts
    const Column<int64_t> held_rows_;      // [ranks]
    const py::object held_array_;
    py::array_t<int64_t> arrived_rows_;    // [stages, ranks]
    const int64_t window_rows_;
    const bool copies_;
};

void bind_intake(py::module_& m);

}  // namespace columns
