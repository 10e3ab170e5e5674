// The tables of a home rank as compiled code sees them: token slots and chunks.
#pragma once

#include <memory>

#include "view.h"

namespace columns {

using Number = int32_t;  // slots, chunks, stages, positions and counts of rows in the tables

// Columns of a `ChunkTable` in asyncmoe/chunks.py; `later`: chunk of the same request.
struct Chunks {
    explicit Chunks(py::handle table);

    // A row of a chunk has all its parts. Whether the chunk is complete and may enter its stage;
    // one that is complete and may not is parked.
    bool completes(int64_t chunk) const {
        if (--missing.at(chunk, "the chunk table") != 0) return false;
        const Number before = earlier[chunk];
        if (before < 0 || stage.at(before, "the chunk table") > stage[chunk]) return true;
        parked[chunk] = true;
        return false;
    }

    Column<Number> missing, stage;
    Column<const Number> earlier, later, rows, request, first_slot;
    Column<bool> parked;
};

// The columns lie where they lay at first: the tables never make them anew.
struct Books {
    // A `TokenTable` and a `ChunkTable`.
    Books(const py::object& table, const py::object& chunks);

    Chunks chunks;
    py::list slots_of_chunk;  // arrays
    // By slot.
    Column<const uint32_t> epoch;
    Column<Number> stage;
    Column<uint64_t> open;
    Column<uint8_t> part_count;
    Column<const Number> chunk, position;

  private:
    py::list arrays_;  // own the columns; not the tables, through which a home would own itself
};

void bind_books(py::module_& m);

}  // namespace columns
