// The columns of an attention or head batch, collected from the tables of its home rank.
#include "rows.h"

#include <algorithm>
#include <vector>

#include "prefetch.h"

namespace columns {
namespace {

// Decode steps, which are chunks of one row, stand before the longer ones; else the order stays.
// `in_order` is filled only if it is another.
int64_t order(const Column<const int64_t>& chunks, const Chunks& table, int64_t* total,
              std::vector<int64_t>* in_order) {
    const auto& rows_of = table.rows;
    py::ssize_t singles = 0;
    *total = 0;
    int64_t before = -1;
    for (py::ssize_t i = 0; i < chunks.size; ++i) {
        table.rows.at(chunks[i], "the chunk table");
        prefetch_at(chunks[i], before, table.rows.data, table.request.data, table.first_slot.data);
        before = chunks[i];
    }
    for (py::ssize_t i = 0; i < chunks.size; ++i) {
        const Number rows = rows_of.at(chunks[i], "the chunk table");
        if (rows < 1) throw py::value_error("a chunk without rows");
        singles += rows == 1;
        *total += rows;
    }
    if (singles == chunks.size) return singles;
    for (const bool longer : {false, true}) {
        for (py::ssize_t i = 0; i < chunks.size; ++i) {
            if ((rows_of[chunks[i]] != 1) == longer) in_order->push_back(chunks[i]);
        }
    }
    return singles;
}

}  // namespace

py::tuple gather_rows(const Books& books, const py::object& given_array) {
    const Chunks& table = books.chunks;
    const auto given = column<int64_t>(given_array, "chunks");
    int64_t rows;
    std::vector<int64_t> in_order;
    auto made = Ref<Gathered>::make();
    Gathered& to = *made;
    to.singles = order(given, table, &rows, &in_order);
    to.segments = given.size;
    to.rows = rows;
    const int64_t size = 2 * to.segments + 3 * rows + (rows + 3) / 4;
    to.numbers.reset(new Number[size]);
    for (int64_t i = 0; i < size; ++i) prefetch_at(i, i - 1, to.numbers.get());
    const int64_t* chunks = in_order.empty() ? given.data : in_order.data();
    auto* request = const_cast<Number*>(to.request());
    auto* counts = const_cast<Number*>(to.counts());
    auto* slots = const_cast<Number*>(to.slots());
    auto* positions = const_cast<Number*>(to.positions());
    auto* epochs = const_cast<uint32_t*>(to.epochs());
    auto* part_count = const_cast<uint8_t*>(to.part_count());
    int64_t row = 0;
    for (int64_t i = 0; i < to.segments; ++i) {
        const int64_t chunk = chunks[i], count = table.rows[chunk];
        request[i] = table.request[chunk];
        counts[i] = static_cast<Number>(count);
        if (count == 1) {
            slots[row++] = table.first_slot[chunk];
            continue;
        }
        const py::object of_chunk = books.slots_of_chunk[chunk];
        const auto list = column<int64_t>(of_chunk, "slots");
        check_size(list.size, count, "slots");
        for (int64_t j = 0; j < count; ++j) slots[row++] = static_cast<Number>(list[j]);
    }
    Number before = -1;
    for (row = 0; row < rows; ++row) {
        const Number slot = slots[row];
        books.position.at(slot, "the token table");
        prefetch_at(slot, before, books.position.data, books.epoch.data, books.part_count.data);
        before = slot;
    }
    for (row = 0; row < rows; ++row) {
        const Number slot = slots[row];
        positions[row] = books.position[slot];
        epochs[row] = books.epoch[slot];
        part_count[row] = books.part_count[slot];
    }
    if (in_order.empty()) return py::make_tuple(given_array, made.object());
    Fresh<int64_t> other(to.segments);
    std::copy(in_order.begin(), in_order.end(), other.data);
    return py::make_tuple(other.array, made.object());
}

py::tuple Gathered::columns(py::handle block_pool) const {
    const py::array pool_2d = array_of<int64_t>(block_pool.attr("table"), "table", 2);
    const auto block_tokens = block_pool.attr("block_tokens").cast<int64_t>();
    const auto* pool = static_cast<const int64_t*>(pool_2d.data());
    const py::ssize_t requests = pool_2d.shape(0), width = pool_2d.shape(1);
    if (block_tokens < 1) throw py::value_error("blocks of no tokens");
    Fresh<int64_t> counts_of(segments), query_start(segments + 1), context(segments);
    Fresh<int64_t> request_of(segments);
    Fresh<int64_t> slot(rows), position(rows), cache_index(rows);
    Fresh<uint32_t> epoch(rows);
    Fresh<uint8_t> parts(rows);
    std::copy_n(slots(), rows, slot.data);
    std::copy_n(positions(), rows, position.data);
    std::copy_n(epochs(), rows, epoch.data);
    std::copy_n(part_count(), rows, parts.data);
    std::copy_n(request(), segments, request_of.data);
    std::copy_n(counts(), segments, counts_of.data);
    int64_t row = 0, longest = 0;
    query_start[0] = 0;
    for (int64_t i = 0; i < segments; ++i) {
        if (request_of[i] < 0 || request_of[i] >= requests) {
            throw py::index_error("request of a chunk");
        }
        const int64_t* const blocks = pool + request_of[i] * width;
        for (const int64_t end = row + counts_of[i]; row < end; ++row) {
            const int64_t block = position[row] / block_tokens;
            if (position[row] < 0 || block >= width) throw py::index_error("position of a row");
            cache_index[row] = blocks[block] * block_tokens + position[row] % block_tokens;
        }
        query_start[i + 1] = row;
        context[i] = position[row - 1] + 1;
        longest = std::max(longest, context[i]);
    }
    const int64_t blocks = (longest + block_tokens - 1) / block_tokens;
    Fresh<int64_t> block_table(segments, blocks);
    for (int64_t i = 0; i < segments; ++i) {
        std::copy_n(pool + request_of[i] * width, blocks, block_table.data + i * blocks);
    }
    return py::make_tuple(counts_of.array, slot.array, epoch.array, parts.array,
                          query_start.array, position.array, cache_index.array, context.array,
                          block_table.array, request_of.array);
}

py::array_t<int64_t> Gathered::at_slots(py::handle of_table) const {
    const auto from = column<int64_t>(of_table, "a column of the token table");
    Fresh<int64_t> found(rows);
    for (int64_t row = 0; row < rows; ++row) found[row] = from.at(slots()[row], "the token table");
    return found.array;
}

namespace {

template <int64_t Gathered::*Member>
PyObject* get_count(PyObject* self, void*) {
    return PyLong_FromLongLong(unboxed<Gathered>(self).*Member);
}

PyObject* columns_of(PyObject* self, PyObject* pool) {
    return guarded(
        [&]() -> PyObject* { return unboxed<Gathered>(self).columns(pool).release().ptr(); });
}

PyObject* at_slots(PyObject* self, PyObject* column) {
    return guarded(
        [&]() -> PyObject* { return unboxed<Gathered>(self).at_slots(column).release().ptr(); });
}

PyGetSetDef fields[] = {
    {"singles", get_count<&Gathered::singles>, nullptr, nullptr, nullptr},
    {"rows", get_count<&Gathered::rows>, nullptr, nullptr, nullptr},
    {},
};

PyMethodDef methods[] = {
    {"columns", columns_of, METH_O, nullptr},
    {"at_slots", at_slots, METH_O, nullptr},
    {},
};

}  // namespace

void bind_rows(py::module_& m) {
    add_box<Gathered>(m, "asyncmoe.native._columns.Gathered",
                      {{Py_tp_methods, methods}, {Py_tp_getset, fields}});
}

}  // namespace columns
