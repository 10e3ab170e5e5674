#include "queues.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "collected.h"
#include "experts.h"

namespace columns {

void Hold::read(int64_t read_rows) {
    rows -= read_rows;
    if (rows == 0) release();
}

void Taken::init(std::vector<RowSegment> taken) {
    segments = std::move(taken);
    if (segments.size() > 1) {  // it takes memory even for one
        std::stable_sort(
            segments.begin(), segments.end(),
            [](const RowSegment& a, const RowSegment& b) { return a.source < b.source; });
    }
    for (const RowSegment& each : segments) rows += each.parcel.rows;
}

int Taken::visit(visitproc visit, void* arg) {
    int stopped = 0;
    const auto each_object = [&](const py::object& reference) {
        if (stopped == 0 && reference.ptr() != nullptr) stopped = visit(reference.ptr(), arg);
    };
    for (RowSegment& each : segments) each.each_reference(each_object);
    return stopped;
}

py::list Taken::payloads() const {
    if (is_read) return py::list();
    py::list found(segments.size());
    for (size_t i = 0; i < segments.size(); ++i) found[i] = segments[i].parcel.payload;
    return found;
}

py::tuple Taken::columns(py::handle local, py::ssize_t local_experts, bool per_expert) const {
    std::vector<Dispatched> parcels;
    parcels.reserve(segments.size());
    for (const RowSegment& each : segments) {
        parcels.emplace_back(each.source, each.parcel.rows, each.parcel.pairs, each.parcel.block);
    }
    return expert_columns(parcels, local, local_experts, per_expert);
}

void Taken::read(const Column<int64_t>& held) {
    if (is_read) return;
    is_read = true;
    for (const RowSegment& each : segments) held.at(each.source, "held_rows") -= each.parcel.rows;
    for (const RowSegment& each : segments) each.hold->read(each.parcel.rows);
}

Queues::Queues(py::object chain_of_stages)
    : chain(std::move(chain_of_stages)),
      rows(py::len(chain)),
      oldest_decision(py::len(chain)),
      oldest_s(py::len(chain)),
      layers_(chain.attr("layers").cast<int64_t>()) {
    const py::object expert = py::module_::import("asyncmoe.stage").attr("Kind").attr("EXPERT");
    for (const py::handle kind : chain.attr("kinds")) {
        queues_.emplace_back();
        queues_.back().experts = kind.is(expert);
    }
    check_size(queues_.size(), rows.array.size(), "chain.kinds");
    std::fill_n(rows.data, queues_.size(), 0);
    std::fill_n(oldest_decision.data, queues_.size(), 0);
    std::fill_n(oldest_s.data, queues_.size(), 0.0);
}

void Queues::Queue::push(Chunk chunk, double now_s, int64_t decision) {
    chunks.push(chunk);
    note(1, now_s, decision);
}

void Queues::Queue::note(int64_t count, double now_s, int64_t decision) {
    if (!runs.empty()) {
        Run& last = runs[runs.size() - 1];
        if (last.joined_s == now_s && last.joined_decision == decision) {
            last.chunks += count;
            return;
        }
    }
    runs.push({count, now_s, decision});
}

Queues::Chunk Queues::Queue::pop() {
    if (--runs[0].chunks == 0) runs.pop();
    return chunks.pop();
}

Queues::Queue& Queues::chunk_queue(int64_t stage) {
    if (stage < 0 || stage >= static_cast<int64_t>(queues_.size()) || queues_[stage].experts) {
        throw py::value_error("stage " + std::to_string(stage) + " has no queue of chunks");
    }
    return queues_[stage];
}

Queues::Queue& Queues::row_queue(int64_t stage) {
    if (!is_expert_stage(stage)) {
        throw py::value_error("stage " + std::to_string(stage) + " has no queue of rows");
    }
    return queues_[stage];
}

void Queues::joined(int64_t stage, int64_t delta, double now_s) {
    if (rows[stage] == 0) {
        oldest_s[stage] = now_s;
        oldest_decision[stage] = decision;
    }
    rows[stage] += delta;
    total += delta;
}

void Queues::left(int64_t stage, int64_t delta) {
    rows[stage] -= delta;
    total -= delta;
    if (rows[stage] == 0) return;
    const Queue& queue = queues_[stage];
    oldest_s[stage] = queue.experts ? queue.segments.front().joined_s
                                    : queue.runs[0].joined_s;
    oldest_decision[stage] = queue.experts ? queue.segments.front().joined_decision
                                           : queue.runs[0].joined_decision;
}

void Queues::put_chunks(int64_t stage, py::handle chunks_array, py::handle rows_array,
                        double now_s, py::handle) {
    const auto chunks = column<int64_t>(chunks_array, "chunks");
    const auto rows_of_each = column<int64_t>(rows_array, "rows");
    check_size(rows_of_each.size, chunks.size, "rows");
    Queue& queue = chunk_queue(stage);
    for (py::ssize_t i = 0; i < chunks.size; ++i) {
        const auto rows_of_it = static_cast<int32_t>(rows_of_each[i]);
        queue.push({static_cast<int32_t>(chunks[i]), rows_of_it}, now_s, decision);
        joined(stage, rows_of_it, now_s);
    }
}

void Queues::put_ready(const Chunks& table, const std::vector<Number>& chunks, double now_s) {
    for (size_t i = 0; i < chunks.size();) {
        const Number stage = table.stage[chunks[i]];
        Queue& queue = chunk_queue(stage);
        int64_t more = 0;
        const size_t first = i;
        for (; i < chunks.size() && table.stage[chunks[i]] == stage; ++i) {
            const Number rows_of_it = table.rows[chunks[i]];
            queue.chunks.push({chunks[i], rows_of_it});
            more += rows_of_it;
        }
        queue.note(i - first, now_s, decision);
        joined(stage, more, now_s);
    }
}

void Queues::put_parcel(int64_t source, py::handle parcel, py::object release, double now_s) {
    put(source, PackedView(parcel), Release(std::move(release)), now_s);
}

void Queues::put(int64_t source, PackedView parcel, Release release, double now_s) {
    const int64_t stage = parcel.stage, more = parcel.rows;
    Queue& queue = row_queue(stage);
    if (source < 0) throw py::value_error("rows come from a rank");
    if (source >= static_cast<int64_t>(latest_.size())) latest_.resize(source + 1);
    latest_[source] = {stage, now_s};
    auto hold = std::make_shared<Hold>(Hold{more, std::move(release)});
    queue.segments.push_back({source, std::move(parcel), std::move(hold), now_s, decision});
    joined(stage, more, now_s);
}

bool Queues::awaits(int64_t stage, int64_t reach, double since_s) const {
    const auto& waiting = queues_.at(stage).segments;
    for (int64_t source = 0; source < static_cast<int64_t>(latest_.size()); ++source) {
        const Latest& latest = latest_[source];
        if (latest.stage < 0 || latest.came_s < since_s) continue;
        const int64_t behind = (layer_of(stage) - layer_of(latest.stage) + layers_) % layers_;
        if (behind == 0 || behind > reach) continue;
        const auto is_of_it = [&](const RowSegment& each) { return each.source == source; };
        if (std::none_of(waiting.begin(), waiting.end(), is_of_it)) return true;
    }
    return false;
}

py::array_t<int64_t> Queues::take_chunks(int64_t stage, int64_t max_rows) {
    Queue& queue = chunk_queue(stage);
    int64_t taken = 0, room = max_rows;
    size_t count = 0;
    while (count < queue.chunks.size() && (count == 0 || queue.chunks[count].rows <= room)) {
        room -= queue.chunks[count].rows;
        taken += queue.chunks[count++].rows;
    }
    Fresh<int64_t> chunks(count);
    for (size_t i = 0; i < count; ++i) chunks[i] = queue.pop().chunk;
    left(stage, taken);
    return chunks.array;
}

Ref<Taken> Queues::take_rows(int64_t stage, int64_t max_rows) {
    Queue& queue = row_queue(stage);
    std::vector<RowSegment> taken;
    int64_t room = max_rows;
    while (!queue.segments.empty() && room > 0) {
        RowSegment& head = queue.segments.front();
        const int64_t here = head.parcel.rows;
        if (here <= room) {
            taken.push_back(std::move(head));
            queue.segments.pop_front();
            room -= here;
            continue;
        }
        const py::object piece = head.parcel.object().attr("piece");
        taken.push_back({head.source, PackedView(piece(0, room)), head.hold, head.joined_s,
                         head.joined_decision});
        head.parcel = PackedView(piece(room, here));
        room = 0;
    }
    left(stage, max_rows - room);
    auto made = Ref<Taken>::make();
    made->init(std::move(taken));
    return made;
}

void Queues::remove_chunks(int64_t stage, py::handle chunks_array) {
    Queue& queue = chunk_queue(stage);
    const auto chunks = column<int64_t>(chunks_array, "chunks");
    const std::unordered_set<int64_t> dead(chunks.data, chunks.data + chunks.size);
    int64_t gone = 0;
    Queue kept{false, {}, {}, {}};
    while (!queue.chunks.empty()) {
        const Run run = queue.runs[0];
        const Chunk each = queue.pop();
        if (dead.count(each.chunk)) {
            gone += each.rows;
        } else {
            kept.push(each, run.joined_s, run.joined_decision);
        }
    }
    std::swap(queue, kept);
    left(stage, gone);
}

int64_t Queues::discard(int64_t source, py::handle slots_array, py::handle epochs_array) {
    const auto slots = column<uint32_t>(slots_array, "slots");
    const auto epochs = column<uint32_t>(epochs_array, "epochs");
    check_size(epochs.size, slots.size, "epochs");
    std::unordered_set<uint64_t> dead;
    for (py::ssize_t i = 0; i < slots.size; ++i) dead.insert(row_key(slots[i], epochs[i]));
    int64_t dropped = 0;
    std::vector<std::pair<std::shared_ptr<Hold>, int64_t>> read;
    for (size_t stage = 0; stage < queues_.size(); ++stage) {
        Queue& queue = queues_[stage];
        if (!queue.experts || queue.segments.empty()) continue;
        int64_t gone = 0;
        std::deque<RowSegment> kept;
        for (RowSegment& each : queue.segments) {
            if (each.source == source) {
                const std::vector<int64_t> alive = alive_rows(each.parcel, dead);
                const int64_t lost = each.parcel.rows - static_cast<int64_t>(alive.size());
                if (lost != 0) read.emplace_back(each.hold, lost);
                gone += lost;
                if (alive.empty()) continue;
                if (lost != 0) each.parcel = PackedView(select(each.parcel, alive));
            }
            kept.push_back(std::move(each));
        }
        queue.segments = std::move(kept);
        left(stage, gone);
        dropped += gone;
    }
    for (const auto& [hold, rows_read] : read) hold->read(rows_read);
    return dropped;
}

namespace {

PyObject* rows_of(PyObject* self, void*) { return PyLong_FromLongLong(unboxed<Taken>(self).rows); }

PyObject* payloads_of(PyObject* self, void*) {
    return guarded([&]() -> PyObject* { return unboxed<Taken>(self).payloads().release().ptr(); });
}

PyObject* columns_of(PyObject* self, PyObject* arguments) {
    return guarded([&]() -> PyObject* {
        PyObject* local;
        Py_ssize_t local_experts;
        int per_expert;
        if (!PyArg_ParseTuple(arguments, "Onp", &local, &local_experts, &per_expert)) {
            throw py::error_already_set();
        }
        const Taken& taken = unboxed<Taken>(self);
        return taken.columns(local, local_experts, per_expert != 0).release().ptr();
    });
}

PyObject* read_all(PyObject* self, PyObject* held_rows) {
    return guarded([&]() -> PyObject* {
        unboxed<Taken>(self).read(writable<int64_t>(held_rows, "held_rows"));
        return py::none().release().ptr();
    });
}

PyGetSetDef taken_fields[] = {
    {"rows", rows_of, nullptr, nullptr, nullptr},
    {"payloads", payloads_of, nullptr, nullptr, nullptr},
    {},
};

PyMethodDef taken_methods[] = {
    {"columns", columns_of, METH_VARARGS, nullptr},
    {"read", read_all, METH_O, nullptr},
    {},
};

}  // namespace

void bind_queues(py::module_& m) {
    add_box<Taken>(m, "asyncmoe.native._columns.Taken",
                   {{Py_tp_methods, taken_methods}, {Py_tp_getset, taken_fields}});
    py::class_<Queues, std::shared_ptr<Queues>>(m, "Queues", collected<Queues>())
        .def(py::init<py::object>())
        .def_readonly("chain", &Queues::chain)
        .def_property_readonly("rows", [](const Queues& each) { return each.rows.array; })
        .def_property_readonly("oldest_s", [](const Queues& each) { return each.oldest_s.array; })
        .def_property_readonly("oldest_decision",
                               [](const Queues& each) { return each.oldest_decision.array; })
        .def_readonly("total", &Queues::total)
        .def_readwrite("decision", &Queues::decision)
        .def("put_chunks", &Queues::put_chunks, py::arg("stage"), py::arg("chunks"),
             py::arg("rows"), py::arg("now_s"), py::arg("total") = py::none())
        .def("put_parcel", &Queues::put_parcel)
        .def("take_chunks", &Queues::take_chunks)
        .def("take_rows",
             [](Queues& queues, int64_t stage, int64_t max_rows) {
                 return queues.take_rows(stage, max_rows).object();
             })
        .def("remove_chunks", &Queues::remove_chunks)
        .def("discard", &Queues::discard)
        .def("awaits", &Queues::awaits);
}

}  // namespace columns
