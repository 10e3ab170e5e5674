#include "departure.h"

#include <utility>

#include "collected.h"
#include "prefetch.h"

namespace columns {
namespace {

constexpr Number kNone = -1;

}  // namespace

Departure::Departure(std::shared_ptr<Books> books, std::shared_ptr<Outboxes> outboxes,
                     std::shared_ptr<Queues> queues, int64_t rank, py::object held_rows,
                     py::object now_s, py::object wake)
    : books_(std::move(books)),
      outboxes_(std::move(outboxes)),
      queues_(std::move(queues)),
      rank_(rank),
      held_array_(std::move(held_rows)),
      held_rows_(writable<int64_t>(held_array_, "held_rows")),
      now_s_(std::move(now_s)),
      wake_(std::move(wake)) {
    held_rows_.at(rank_, "held_rows");
}

bool Departure::leave(py::handle gathered, const py::object& chunks_array, int64_t stage,
                      py::handle parts_array, const py::list& parcels) {
    const auto of = Ref<Gathered>::of(gathered);
    const Gathered& rows = *of;
    const auto chunks = column<int64_t>(chunks_array, "chunks");
    const auto parts = column<uint8_t>(parts_array, "parts");
    check_size(chunks.size, rows.segments, "chunks");
    check_size(parts.size, rows.rows, "parts");
    if (!queues_->is_expert_stage(stage)) throw py::value_error("no expert stage");
    if (!all_alive(rows)) return false;
    if (leave_stage(rows, chunks, static_cast<Number>(stage + 1))) call(wake_, chunks_array);
    expect(rows, static_cast<Number>(stage), parts);
    const py::object local = outboxes_->send(parcels);
    if (local.is_none()) return true;
    PackedView parcel(local);
    if (parcel.rows == 0) return true;
    held_rows_[rank_] += parcel.rows;
    queues_->put(rank_, std::move(parcel), Release(), now_s_());
    return true;
}

// A request's rows die together, so that the last of each segment stands for it.
bool Departure::all_alive(const Gathered& rows) const {
    bool alive = true;
    Number before = -1;
    for (int64_t i = 0; i < rows.rows; ++i) {
        const Number slot = rows.slots()[i];
        prefetch_at(slot, before, books_->epoch.data, books_->stage.data, books_->open.data,
                    books_->part_count.data);
        before = slot;
    }
    int64_t row = 0;
    for (int64_t i = 0; i < rows.segments; ++i) {
        row += rows.counts()[i];
        alive &= books_->epoch[rows.slots()[row - 1]] == rows.epochs()[row - 1];
    }
    return alive;
}

// The chunks wait for all their rows, and stage `next`. Whether any has a later one.
bool Departure::leave_stage(const Gathered& rows, const Column<const int64_t>& chunks,
                            Number next) {
    const Chunks& table = books_->chunks;
    bool followed = false;
    int64_t before = -1;
    for (int64_t i = 0; i < rows.segments; ++i) {
        table.stage.at(chunks[i], "the chunk table");
        prefetch_at(chunks[i], before, table.stage.data, table.missing.data, table.later.data);
        before = chunks[i];
    }
    for (int64_t i = 0; i < rows.segments; ++i) {
        table.stage[chunks[i]] = next;
        table.missing[chunks[i]] = rows.counts()[i];
        followed |= table.later[chunks[i]] != kNone;
    }
    return followed;
}

void Departure::expect(const Gathered& rows, Number stage, const Column<const uint8_t>& parts) {
    for (int64_t i = 0; i < rows.rows; ++i) {
        const Number slot = rows.slots()[i];
        const uint8_t count = parts[i];
        if (count > 64) throw py::index_error("parts of a token");
        books_->stage[slot] = stage;
        books_->part_count[slot] = count;
        books_->open[slot] = count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
    }
}

void bind_departure(py::module_& m) {
    py::class_<Departure, std::shared_ptr<Departure>>(m, "Departure", collected<Departure>())
        .def(py::init<std::shared_ptr<Books>, std::shared_ptr<Outboxes>, std::shared_ptr<Queues>,
                      int64_t, py::object, py::object, py::object>())
        .def("leave", &Departure::leave);
}

}  // namespace columns
