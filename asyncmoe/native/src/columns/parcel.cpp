#include "parcel.h"

#include <algorithm>
#include <utility>

#include "block.h"
#include "members.h"
#include "numbers.h"

namespace columns {

bool is_packed(py::handle parcel) {
    return Py_TYPE(parcel.ptr()) == reinterpret_cast<PyTypeObject*>(names().packed_parcel.ptr());
}

PackedView::PackedView(py::handle parcel)
    : packed(is_packed(parcel) ? py::reinterpret_borrow<py::object>(parcel)
                               : call(names().pack, parcel)) {
    const auto& slot = members().parcel;
    PyObject* const from = packed.ptr();
    kind = whole(slot.kind.of(from));
    stage = whole(slot.stage.of(from));
    rows = whole(slot.count.of(from));
    pairs = whole(slot.pairs.of(from));
    credits = whole(slot.credits.of(from));
    block = py::reinterpret_borrow<py::object>(slot.block.of(from));
    payload = py::reinterpret_borrow<py::object>(slot.payload.of(from));
    const TensorRows* noted = Described::of(slot.described.of(from), payload);
    if (noted != nullptr) described = *noted;
}

PackedView::PackedView(const Prelude& head, py::object columns, py::object rows_of_it)
    : block(std::move(columns)),
      payload(std::move(rows_of_it)),
      kind(head.parcel_class),
      stage(head.stage),
      rows(head.rows),
      pairs(head.pairs),
      credits(head.credits) {}

PackedView::PackedView(int64_t stage, int64_t rows, py::object columns, py::object rows_of_it,
                       int64_t credits, const TensorRows& described)
    : block(std::move(columns)),
      payload(std::move(rows_of_it)),
      kind(kCombine),
      stage(stage),
      rows(rows),
      pairs(0),
      credits(credits),
      described(described) {}

py::object PackedView::object() const {
    if (packed) return packed;
    return make_parcel(static_cast<int>(kind), stage, rows, pairs, block, payload, credits,
                       py::none());
}

std::vector<int64_t> alive_rows(const PackedView& parcel,
                                const std::unordered_set<uint64_t>& dead) {
    const Bytes bytes(parcel.block);
    if (!is_dispatch(bytes.size(), parcel.rows, parcel.pairs)) {
        throw py::value_error("a block does not fit its rows and pairs");
    }
    const Dispatch<const uint8_t> in(bytes.data(), parcel.rows, parcel.pairs);
    std::vector<int64_t> alive;
    for (int64_t row = 0; row < parcel.rows; ++row) {
        if (!dead.count(row_key(in.slot[row], in.epoch[row]))) alive.push_back(row);
    }
    return alive;
}

py::object select(const PackedView& parcel, const std::vector<int64_t>& rows) {
    Fresh<int64_t> keep(rows.size());
    std::copy(rows.begin(), rows.end(), keep.data);
    return parcel.object().attr("select")(keep.array);
}

py::object make_parcel(int kind, int64_t stage, int64_t rows, int64_t pairs, py::handle block,
                       py::handle payload, int64_t credits, const py::object& described) {
    const auto& slot = members().parcel;
    py::object parcel = blank(names().packed_parcel);
    PyObject* const to = parcel.ptr();
    slot.kind.set(to, names().kinds[kind].ptr());
    slot.stage.set(to, py::int_(stage));
    slot.count.set(to, py::int_(rows));
    slot.pairs.set(to, py::int_(pairs));
    slot.block.set(to, block.ptr());
    slot.payload.set(to, payload.ptr());
    slot.credits.set(to, py::int_(credits));
    slot.described.set(to, described);
    return parcel;
}

}  // namespace columns
