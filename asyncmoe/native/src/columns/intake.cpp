#include "intake.h"

#include <utility>

#include "block.h"
#include "collected.h"
#include "members.h"
#include "prefetch.h"
#include "wire.h"

namespace columns {
namespace {

struct Attributes {
    PyObject* const dtype = PyUnicode_InternFromString("dtype");
    PyObject* const append = PyUnicode_InternFromString("append");
    PyObject* const popleft = PyUnicode_InternFromString("popleft");
};

const Attributes& attributes() {
    static const Attributes* const found = new Attributes;
    return *found;
}

// What `RankTimes` in asyncmoe/stats.py counts of parcels.
struct TimesMembers {
    Member receive_s, received_parcels;
};

const TimesMembers& of_times() {
    static const TimesMembers* const found = [] {
        const py::object type = py::module_::import("asyncmoe.stats").attr("RankTimes");
        return new TimesMembers{Member(type, "receive_s"), Member(type, "received_parcels")};
    }();
    return *found;
}

Release release_of(py::handle arrival) {
    return Release(py::reinterpret_borrow<py::object>(members().arrival.release.of(arrival.ptr())));
}

// Our code of a torch dtype; 0: none.
int code_of(const py::object& dtype) {
    for (int code = 1; code <= kDtypes; ++code) {
        if (names().dtypes[code].is(dtype)) return code;
    }
    return 0;
}

// The row of `local` [MoE layers, experts] that is each stage's; none for one that has no experts.
std::vector<Intake::Local> of_stages(const py::array& local, const Queues& queues) {
    std::vector<Intake::Local> found;
    const int64_t stages = queues.rows.array.size();
    for (int64_t stage = 0; stage < stages; ++stage) {
        found.emplace_back();
        if (!queues.is_expert_stage(stage)) continue;
        const py::object layer = queues.chain.attr("layer")(stage);
        const py::object of_layer = local.attr("__getitem__")(layer);
        found.back() = {of_layer, column<int64_t>(of_layer, "local")};
    }
    return found;
}

}  // namespace

Homecoming::Homecoming(py::object table, std::shared_ptr<Books> books,
                       std::shared_ptr<Queues> queues, py::object now_s,
                       py::object see_to_arrivals, py::object look)
    : table_(table),
      see_to_arrivals_(std::move(see_to_arrivals)),
      look_(std::move(look)),
      now_s_(std::move(now_s)),
      arrived_(table.attr("arrived")),
      copied_(table.attr("copied")),
      books_(std::move(books)),
      queues_(std::move(queues)),
      max_parts_(table.attr("max_parts").cast<int64_t>()),
      has_columns_(table.attr("has_columns").cast<bool>()) {}

void Homecoming::take_in(const PackedView& parcel, Release release) {
    std::vector<Number> done = std::move(done_);  // ours alone: others are called below
    done.clear();
    const Bytes bytes(parcel.block);
    if (!is_combine(bytes.size(), parcel.rows)) {
        throw py::value_error("a block does not fit its rows");
    }
    const Combine<const uint8_t> in(bytes.data(), parcel.rows);
    const Books& books = *books_;
    const Accepted accepted = accept_rows(parcel.stage, in, parcel.rows,
                                          {books.epoch,
                                           {books.stage.data, books.stage.size},
                                           books.open,
                                           max_parts_},
                                          &done);
    const bool is_awaited = release.is_awaited();
    const bool any = accepted.all ? parcel.rows != 0 : !accepted.kept.empty();
    if (has_columns_ && any) {
        arrive(parcel, in, accepted, release);
    } else {
        release();
    }
    if (!accepted.all) {
        table_.attr("drop")(parcel.rows - static_cast<int64_t>(accepted.kept.size()));
    }
    complete(&done);
    done_ = std::move(done);
    if (is_awaited && length_of(arrived_) > 0) {
        is_awaited_ = true;
        call(see_to_arrivals_);
    }
}

void Homecoming::arrive(const PackedView& parcel, const Combine<const uint8_t>& in,
                        const Accepted& accepted, const Release& release) {
    py::object entry;
    if (accepted.all) {  // who copies them finds their places in the block
        entry = py::make_tuple(parcel.payload, parcel.block, release.object());
    } else {
        const py::object payload = parcel.payload.attr("__getitem__")(rows_of(accepted));
        entry = py::make_tuple(payload, places_of(in, accepted, parcel.rows, max_parts_),
                               release.object());
    }
    call_method(arrived_, attributes().append, entry);
}

void Homecoming::let_go() {
    while (length_of(copied_) > 0) {
        const py::object release = call_method(copied_, attributes().popleft);
        call(release);
    }
    if (!is_awaited_) return;
    is_awaited_ = length_of(arrived_) > 0;
    const py::object look = look_;
    call(look);
}

void Homecoming::complete(std::vector<Number>* done) {
    const Chunks& chunks = books_->chunks;
    size_t ready = 0;
    Number before = -1;
    for (Number& slot : *done) {
        slot = books_->chunk.at(slot, "chunk");
        chunks.stage.at(slot, "the chunk table");
        prefetch_at(slot, before, chunks.missing.data, chunks.stage.data, chunks.earlier.data,
                    chunks.rows.data);
        before = slot;
    }
    for (const Number chunk : *done) {
        if (chunks.completes(chunk)) (*done)[ready++] = chunk;
    }
    done->resize(ready);
    if (ready != 0) queues_->put_ready(chunks, *done, now_s_());
}

Intake::Intake(py::object receptor, std::shared_ptr<Queues> queues,
               std::shared_ptr<Outboxes> outboxes, std::shared_ptr<Homecoming> homecoming,
               std::shared_ptr<Bell> bell, py::object other, py::object failed)
    : queues_(std::move(queues)),
      outboxes_(std::move(outboxes)),
      homecoming_(std::move(homecoming)),
      bell_(std::move(bell)),
      other_(std::move(other)),
      failed_(std::move(failed)),
      times_(receptor.attr("times")),
      clock_(times_.attr("clock")),
      now_s_(receptor.attr("now_s")),
      dtype_(receptor.attr("dtype")),
      dtype_code_(code_of(dtype_)),
      local_(of_stages(receptor.attr("local"), *queues_)),
      held_rows_(writable<int64_t>(receptor.attr("held_rows"), "held_rows")),
      held_array_(receptor.attr("held_rows")),
      arrived_rows_(receptor.attr("arrived_rows")),
      window_rows_(receptor.attr("window_rows").cast<int64_t>()),
      copies_(receptor.attr("copies").cast<bool>()) {}

std::shared_ptr<Intake> Intake::of(const py::object& callback) {
    if (!PyMethod_Check(callback.ptr())) return nullptr;
    const py::handle self = PyMethod_GET_SELF(callback.ptr());
    const bool is_take = py::isinstance<Intake>(self) &&
                         callback.equal(self.attr("take"));
    return is_take ? self.cast<std::shared_ptr<Intake>>() : nullptr;
}

void Intake::take(py::handle arrival) {
    if (is_open) {
        if (!py::isinstance(arrival, names().arrival)) throw py::type_error("no arrival");
        const py::handle from(members().arrival.source.of(arrival.ptr()));
        const auto source = from.cast<int64_t>();
        if (timed(source, [&] { return take_plain(arrival, source); })) return;
    }
    call(other_, arrival);
}

bool Intake::take(int64_t source, int dtype, PackedView parcel, Release release) {
    if (!is_open || copies_ || dtype != dtype_code_) return false;
    return timed(source, [&] { return take_plain(source, parcel, release); });
}

// Counts what was taken. Raises ProtocolError, which is the peer's fault; after another error,
// which `failed` hears of, nothing is left to be taken.
template <typename F>
bool Intake::timed(int64_t source, F take_it) {
    try {
        const double begin_s = clock_();
        if (!take_it()) return false;
        PyObject* const times = times_.ptr();
        const double more_s = clock_() - begin_s;
        const double before_s = PyFloat_AsDouble(of_times().receive_s.of(times));
        const py::handle parcels(of_times().received_parcels.of(times));
        of_times().receive_s.set(times, py::float_(before_s + more_s));
        of_times().received_parcels.set(times, py::int_(parcels.cast<int64_t>() + 1));
    } catch (py::error_already_set& error) {
        if (error.matches(names().protocol_error)) throw;
        failed_(error.value(), "a parcel", source);
    } catch (const std::exception& error) {
        if (const auto* known = dynamic_cast<const py::builtin_exception*>(&error)) {
            known->set_error();
        } else {
            PyErr_SetString(PyExc_RuntimeError, error.what());
        }
        failed_(py::error_already_set().value(), "a parcel", source);
    }
    return true;
}

bool Intake::take_plain(py::handle arrival, int64_t source) {
    const py::handle given = members().arrival.parcel.of(arrival.ptr());
    if (copies_ || !is_packed(given)) return false;
    const PackedView parcel(given);
    return get(parcel.payload, attributes().dtype).is(dtype_) &&
           take_plain(source, parcel, release_of(arrival));
}

bool Intake::take_plain(int64_t source, PackedView parcel, Release release) {
    if (!queues_->is_expert_stage(parcel.stage) || source < 0 || source >= held_rows_.size) {
        return false;
    }
    if (parcel.kind == kDispatch) {
        return take_dispatch(source, std::move(parcel), std::move(release));
    }
    if (!homecoming_) return false;
    bell_->ring();  // before the home asks to be called behind the choice that follows
    // Credits first: a parcel with wrong ones is refused as a whole, and its lease taken back.
    outboxes_->credit(source, parcel.credits);
    homecoming_->take_in(parcel, std::move(release));
    return true;
}

bool Intake::take_dispatch(int64_t source, PackedView parcel, Release release) {
    const int64_t held = held_rows_[source] + parcel.rows;
    if (parcel.rows == 0 || held > window_rows_ ||
        !all_local(parcel.block, parcel.rows, parcel.pairs, local_[parcel.stage].column)) {
        return false;
    }
    bell_->ring();
    held_rows_[source] = held;
    *arrived_rows_.mutable_data(parcel.stage, source) += parcel.rows;
    queues_->put(source, std::move(parcel), std::move(release), now_s_());
    return true;
}

void bind_intake(py::module_& m) {
    py::class_<Homecoming, std::shared_ptr<Homecoming>>(m, "Homecoming", collected<Homecoming>())
        .def(py::init<py::object, std::shared_ptr<Books>, std::shared_ptr<Queues>, py::object,
                      py::object, py::object>())
        .def("take_in", [](Homecoming& home, py::handle parcel, py::object release) {
            home.take_in(PackedView(parcel), Release(std::move(release)));
        })
        .def("let_go", &Homecoming::let_go);
    py::class_<Intake, std::shared_ptr<Intake>>(m, "Intake", collected<Intake>())
        .def(py::init<py::object, std::shared_ptr<Queues>, std::shared_ptr<Outboxes>,
                      std::shared_ptr<Homecoming>, std::shared_ptr<Bell>, py::object,
                      py::object>())
        .def("take", py::overload_cast<py::handle>(&Intake::take))
        .def_readwrite("is_open", &Intake::is_open);
}

}  // namespace columns
