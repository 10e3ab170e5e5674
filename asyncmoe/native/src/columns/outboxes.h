// What one rank sends to the others: the compiled twin of `Outboxes` in asyncmoe/outbox.py.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "parcel.h"

namespace columns {

class Outboxes {
  public:
    // See the twin. `sent_rows`: [stages, ranks].
    Outboxes(int64_t rank, int64_t world, int64_t window_rows, int64_t parcel_rows,
             int64_t row_bytes, py::object transport, py::array_t<int64_t> sent_rows);

    py::object send(const py::list& parcels);
    // `described`: a `Described` of `out`, or None.
    std::vector<PackedView> answer(int64_t stage, const py::list& back, const py::object& out,
                                   py::handle described);
    void credit(int64_t peer, int64_t rows);
    void discard(py::handle slots, py::handle epochs);
    void forget(int64_t peer);
    py::dict held_back(int64_t stage) const;

    py::list bytes_to() const;

    template <typename F>
    void each_reference(F visit) {
        visit(transport_);
        for (const auto& box : boxes_) {
            if (box == nullptr || box.use_count() > 1) continue;
            for (Waiting& each : box->waiting) visit(each.parcel);
        }
    }

    int64_t sent_parcels = 0, waiting_rows = 0, outstanding_rows = 0;

  private:
    struct Waiting {
        py::object parcel;
        int64_t rows, stage;
    };
    struct Box {
        int64_t available;
        std::deque<Waiting> waiting;
    };

    bool next(Box* box, Waiting* parcel);
    void flush(int64_t peer);
    void post(int64_t peer, const PackedView& parcel);
    void post_pieces(int64_t peer, const PackedView& parcel);

    const int64_t rank_, window_, parcel_rows_, row_bytes_;
    py::object transport_;
    py::array_t<int64_t> sent_rows_;
    std::vector<std::shared_ptr<Box>> boxes_;  // by rank; null: oneself, or one that is lost
    std::vector<int64_t> bytes_to_;
};

void bind_outboxes(py::module_& m);

}  // namespace columns
