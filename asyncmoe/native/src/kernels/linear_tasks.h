// What the tasks of a linear layer are told.
#pragma once

#include "linear.h"
#include "rows.h"

namespace asyncmoe {

struct LinearCall {
    LinearLayer layer;
    PreparedRows rows;
    int64_t count;  // rows
    void* out;
    int64_t panels_per_task, rows_per_task, row_blocks;
};

}  // namespace asyncmoe
