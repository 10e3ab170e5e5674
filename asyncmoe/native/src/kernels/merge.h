// Rows of a token table: each slot's residual, and the parts that came back to it.
#pragma once

#include <cstdint>

namespace asyncmoe {

// out[i] = residual[slots[i]] + parts[slots[i], 0] + … + parts[slots[i], counts[i] - 1], summed in
// that order in float32.
struct MergeCall {
    const void* residual;   // [table slots, width]
    const void* parts;      // [table slots, max_parts, width]
    const int64_t* slots;   // [rows]
    const uint8_t* counts;  // [rows]
    void* out;              // [rows, width]
    int64_t rows, table_slots;
    int max_parts, width;
    int rows_per_task;  // filled in by `merge`
};

// Elements are bfloat16 or float32. Throws `std::out_of_range` for a slot or a count that the table
// does not have, before anything is read.
void merge(MergeCall call, bool bf16);

}  // namespace asyncmoe
