#include "outboxes.h"

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include "collected.h"
#include "function.h"
#include "writer.h"

namespace columns {
namespace {

constexpr int64_t kSmallestShare = 4;  // see `Outbox.SMALLEST_SHARE`

struct Attributes {
    PyObject* const post = PyUnicode_InternFromString("post");
    PyObject* const split = PyUnicode_InternFromString("split_with_sizes");
    py::object peer_lost = py::module_::import("asyncmoe.errors").attr("PeerLost");
};

const Attributes& attributes() {
    static const Attributes* const found = new Attributes;
    return *found;
}

int64_t number(py::handle object) {
    const int64_t value = PyLong_AsLongLong(object.ptr());
    if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
    return value;
}

py::object piece(const py::object& parcel, int64_t first, int64_t last) {
    return parcel.attr("piece")(first, last);
}

// What a transport's `post` has for this peer, if it is a compiled table; else null.
py::object door_of(const py::object& post, int64_t peer) {
    const ByKey* doors = Function<2, ByKey>::of(post);
    if (doors == nullptr) return py::object();
    PyObject* const found = PyDict_GetItemWithError(doors->table.ptr(), py::int_(peer).ptr());
    if (found == nullptr && PyErr_Occurred()) throw py::error_already_set();
    return py::reinterpret_borrow<py::object>(found);
}

// Rows of a tensor from `first` on.
TensorRows part_of(const TensorRows& whole, int64_t first, int64_t rows) {
    const uint64_t before = first * whole.hidden * item_bytes(whole.dtype);
    return {whole.dtype, rows, whole.hidden, whole.data == nullptr ? nullptr : whole.data + before};
}

// Where the parcels to ranks above `rank` begin; those of `rank_of` ascend.
template <typename F>
size_t first_above(size_t count, int64_t rank, F rank_of) {
    size_t first = 0;
    while (first < count && rank_of(first) <= rank) ++first;
    return first;
}

}  // namespace

Outboxes::Outboxes(int64_t rank, int64_t world, int64_t window_rows, int64_t parcel_rows,
                   int64_t row_bytes, py::object transport, py::array_t<int64_t> sent_rows)
    : rank_(rank),
      window_(window_rows),
      parcel_rows_(parcel_rows),
      row_bytes_(row_bytes),
      transport_(std::move(transport)),
      sent_rows_(std::move(sent_rows)),
      boxes_(world),
      bytes_to_(world, 0) {
    if (window_rows < 1) {
        throw py::value_error("credit window of " + std::to_string(window_rows) +
                              " rows; at least 1");
    }
    if (sent_rows_.ndim() != 2 || sent_rows_.shape(1) != world) {
        throw py::value_error("sent_rows is not of all ranks");
    }
    for (int64_t peer = 0; peer < world; ++peer) {
        if (peer != rank) boxes_[peer] = std::make_shared<Box>(Box{window_, {}});
    }
}

py::object Outboxes::send(const py::list& parcels) {
    const size_t count = parcels.size();
    const auto rank_of = [&](size_t i) {
        return number(PyTuple_GET_ITEM(PyList_GET_ITEM(parcels.ptr(), i), 0));
    };
    const size_t above = first_above(count, rank_, rank_of);
    py::object local = py::none();
    for (size_t turn = 0; turn < count; ++turn) {
        const size_t i = (above + turn) % count;
        const int64_t to = rank_of(i);
        const auto parcel = py::reinterpret_borrow<py::object>(
            PyTuple_GET_ITEM(PyList_GET_ITEM(parcels.ptr(), i), 1));
        if (to == rank_) {
            local = parcel;
        } else if (to >= 0 && to < static_cast<int64_t>(boxes_.size()) && boxes_[to]) {
            const PackedView view(parcel);  // else it is lost
            boxes_[to]->waiting.push_back({parcel, view.rows, view.stage});
            waiting_rows += view.rows;
            flush(to);
        }
    }
    return local;
}

std::vector<PackedView> Outboxes::answer(int64_t stage, const py::list& back,
                                         const py::object& out, py::handle described) {
    const size_t count = back.size();
    py::list sizes(count);
    std::vector<PackedView> local;
    std::vector<TensorRows> of_parts(count);
    const TensorRows* whole = Described::of(described, out);
    int64_t first = 0;
    for (size_t i = 0; i < count; ++i) {
        sizes[i] = py::reinterpret_borrow<py::object>(
            PyTuple_GET_ITEM(PyList_GET_ITEM(back.ptr(), i), 1));
        if (whole == nullptr) continue;
        of_parts[i] = part_of(*whole, first, number(sizes[i]));
        first += of_parts[i].rows;
    }
    py::object parts;  // views of `out`
    if (count > 1) parts = call_method(out, attributes().split, sizes);
    const auto rank_of = [&](size_t i) {
        return number(PyTuple_GET_ITEM(PyList_GET_ITEM(back.ptr(), i), 0));
    };
    const size_t above = first_above(count, rank_, rank_of);
    for (size_t turn = 0; turn < count; ++turn) {
        const size_t i = (above + turn) % count;
        PyObject* entry = PyList_GET_ITEM(back.ptr(), i);
        const int64_t home = rank_of(i), rows = number(PyTuple_GET_ITEM(entry, 1));
        const py::object payload = count > 1 ? py::object(parts[py::int_(i)]) : out;
        const auto block = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(entry, 3));
        const PackedView parcel(stage, rows, block, payload, number(PyTuple_GET_ITEM(entry, 2)),
                                of_parts[i]);
        if (home == rank_) {
            local.push_back(parcel);
        } else {
            post_pieces(home, parcel);
        }
    }
    return local;
}

// The next parcel, or the first rows of it, for which there are credits; taken.
bool Outboxes::next(Box* box, Waiting* parcel) {
    if (box->waiting.empty()) return false;
    Waiting& head = box->waiting.front();
    const int64_t wanted = head.rows;
    const int64_t least = std::min(wanted, std::max<int64_t>(1, window_ / kSmallestShare));
    if (box->available < least) return false;
    const int64_t rows = std::min({wanted, parcel_rows_, box->available});
    box->available -= rows;
    outstanding_rows += rows;
    waiting_rows -= rows;
    if (rows == wanted) {
        *parcel = std::move(head);
        box->waiting.pop_front();
        return true;
    }
    *parcel = {piece(head.parcel, 0, rows), rows, head.stage};
    head = {piece(head.parcel, rows, wanted), wanted - rows, head.stage};
    return true;
}

void Outboxes::flush(int64_t peer) {
    const std::shared_ptr<Box> box = boxes_[peer];  // it may be forgotten meanwhile
    Waiting parcel;
    while (next(box.get(), &parcel)) {
        *sent_rows_.mutable_data(parcel.stage, peer) += parcel.rows;
        post(peer, PackedView(parcel.parcel));
    }
}

void Outboxes::post_pieces(int64_t peer, const PackedView& parcel) {
    if (parcel.rows <= parcel_rows_) {
        post(peer, parcel);
        return;
    }
    const py::object whole = parcel.object();
    for (int64_t first = 0; first < parcel.rows; first += parcel_rows_) {
        const int64_t last = std::min(first + parcel_rows_, parcel.rows);
        post(peer, PackedView(piece(whole, first, last)));
    }
}

void Outboxes::post(int64_t peer, const PackedView& parcel) {
    try {
        const py::object way = get(transport_, attributes().post), door = door_of(way, peer);
        const Writer::Poster* poster = door ? Function<1, Writer::Poster>::of(door) : nullptr;
        if (poster != nullptr) {
            poster->post(parcel);
        } else {
            call(way, py::int_(peer), parcel.object());
        }
    } catch (py::error_already_set& error) {
        if (!error.matches(attributes().peer_lost)) throw;
        return;  // whoever depends on it is told by `on_peer_lost`
    }
    ++sent_parcels;
    bytes_to_[peer] += parcel.rows * row_bytes_;
}

void Outboxes::credit(int64_t peer, int64_t rows) {
    if (rows == 0) return;
    if (peer < 0 || peer >= static_cast<int64_t>(boxes_.size()) || !boxes_[peer]) {
        throw py::key_error(std::to_string(peer));
    }
    Box& box = *boxes_[peer];
    const int64_t outstanding = window_ - box.available;
    if (rows < 0 || rows > outstanding) {
        PyErr_Format(names().protocol_error,
                     "peer gives back %lld credits; allowed: 0 to the %lld outstanding",
                     static_cast<long long>(rows), static_cast<long long>(outstanding));
        throw py::error_already_set();
    }
    box.available += rows;
    outstanding_rows -= rows;
    if (!box.waiting.empty()) flush(peer);
}

void Outboxes::discard(py::handle slots_array, py::handle epochs_array) {
    const auto slots = column<uint32_t>(slots_array, "slots");
    const auto epochs = column<uint32_t>(epochs_array, "epochs");
    check_size(epochs.size, slots.size, "epochs");
    std::unordered_set<uint64_t> dead;
    for (py::ssize_t i = 0; i < slots.size; ++i) dead.insert(row_key(slots[i], epochs[i]));
    for (size_t peer = 0; peer < boxes_.size(); ++peer) {
        const std::shared_ptr<Box> box = boxes_[peer];
        if (!box || box->waiting.empty()) continue;
        std::deque<Waiting> kept;
        for (Waiting& each : box->waiting) {
            const PackedView view(each.parcel);
            const std::vector<int64_t> alive = alive_rows(view, dead);
            const int64_t left = alive.size();
            waiting_rows -= view.rows - left;
            if (left == 0) continue;
            if (left < view.rows) each = {select(view, alive), left, each.stage};
            kept.push_back(std::move(each));
        }
        box->waiting = std::move(kept);
        flush(peer);
    }
}

void Outboxes::forget(int64_t peer) {
    if (peer < 0 || peer >= static_cast<int64_t>(boxes_.size()) || !boxes_[peer]) return;
    outstanding_rows -= window_ - boxes_[peer]->available;
    for (const Waiting& each : boxes_[peer]->waiting) waiting_rows -= each.rows;
    boxes_[peer]->waiting.clear();
    boxes_[peer]->available = window_;
    boxes_[peer].reset();
}

py::dict Outboxes::held_back(int64_t stage) const {
    py::dict found;
    for (size_t peer = 0; peer < boxes_.size(); ++peer) {
        if (!boxes_[peer]) continue;
        int64_t rows = 0;
        for (const Waiting& each : boxes_[peer]->waiting) {
            if (each.stage == stage) rows += each.rows;
        }
        if (rows != 0) found[py::int_(peer)] = rows;
    }
    return found;
}

py::list Outboxes::bytes_to() const {
    py::list found;
    for (const int64_t bytes : bytes_to_) found.append(bytes);
    return found;
}

void bind_outboxes(py::module_& m) {
    py::class_<Outboxes, std::shared_ptr<Outboxes>>(m, "Outboxes", collected<Outboxes>())
        .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t, py::object,
                      py::array_t<int64_t>>())
        .def("send", &Outboxes::send)
        .def("answer",
             [](Outboxes& outboxes, int64_t stage, const py::list& back, const py::object& out) {
                 py::list local;
                 for (const PackedView& each : outboxes.answer(stage, back, out, py::none())) {
                     local.append(each.object());
                 }
                 return local;
             })
        .def("credit", &Outboxes::credit)
        .def("discard", &Outboxes::discard)
        .def("forget", &Outboxes::forget)
        .def("held_back", &Outboxes::held_back)
        .def_readonly("waiting_rows", &Outboxes::waiting_rows)
        .def_readonly("outstanding_rows", &Outboxes::outstanding_rows)
        .def_property_readonly("bytes_to", &Outboxes::bytes_to)
        .def_readonly("sent_parcels", &Outboxes::sent_parcels);
}

}  // namespace columns
