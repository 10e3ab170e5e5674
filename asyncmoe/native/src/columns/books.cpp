#include "books.h"

#include "rows.h"

namespace columns {
namespace {

Column<Number> numbers(py::handle table, const char* name) {
    return writable<Number>(table.attr(name), name);
}

Column<const Number> constant(py::handle table, const char* name) {
    return column<Number>(table.attr(name), name);
}

}  // namespace

Chunks::Chunks(py::handle table)
    : missing(numbers(table, "missing")),
      stage(numbers(table, "stage")),
      earlier(constant(table, "earlier")),
      later(constant(table, "later")),
      rows(constant(table, "rows")),
      request(constant(table, "request")),
      first_slot(constant(table, "first_slot")),
      parked(writable<bool>(table.attr("parked"), "parked")) {
    check_size(stage.size, missing.size, "stage");
    check_size(parked.size, missing.size, "parked");
    for (const auto& each : {earlier, later, rows, request, first_slot}) {
        check_size(each.size, missing.size, "a column of the chunk table");
    }
}

Books::Books(const py::object& table, const py::object& chunk_table)
    : chunks(chunk_table),
      slots_of_chunk(chunk_table.attr("slots")),
      epoch(column<uint32_t>(table.attr("epoch"), "epoch")),
      stage(numbers(table, "stage")),
      open(writable<uint64_t>(table.attr("open"), "open")),
      part_count(writable<uint8_t>(table.attr("part_count"), "part_count")),
      chunk(constant(table, "chunk")),
      position(constant(table, "position")) {
    check_size(stage.size, epoch.size, "stage");
    check_size(open.size, epoch.size, "open");
    check_size(part_count.size, epoch.size, "part_count");
    check_size(chunk.size, epoch.size, "chunk");
    check_size(position.size, epoch.size, "position");
    check_size(slots_of_chunk.size(), chunks.rows.size, "slots");
    for (const char* name : {"epoch", "stage", "open", "part_count", "chunk", "position"}) {
        arrays_.append(table.attr(name));
    }
    for (const char* name : {"missing", "stage", "earlier", "later", "rows", "request",
                             "first_slot", "parked"}) {
        arrays_.append(chunk_table.attr(name));
    }
}

void bind_books(py::module_& m) {
    py::class_<Books, std::shared_ptr<Books>>(m, "Books")
        .def(py::init<const py::object&, const py::object&>())
        .def("gather", &gather_rows);
    bind_rows(m);
}

}  // namespace columns
