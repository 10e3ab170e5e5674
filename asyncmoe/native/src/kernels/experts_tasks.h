// What the tasks of an expert layer are told.
#pragma once

#include "experts.h"
#include "rows.h"

namespace asyncmoe {

// An expert that has pairs, and which: [first, end).
struct ActiveExpert {
    int64_t expert, first, end;
};

struct ExpertsCall {
    ExpertsLayer layer;
    Pairs pairs;
    const ActiveExpert* active;
    PreparedRows rows;   // of x
    char* inner;           // [pairs, width] act(gate) * up
    int64_t inner_stride;  // bytes
    bool inner_bf16;       // they are bfloat16, else floats
    PreparedRows inner_rows;  // the same, for `down`
    float* outputs;        // [pairs, output_stride]
    int64_t output_stride;
    const void* residual;  // [out_rows, hidden], added to `out`; null: nothing is
    void* out;
    int64_t gate_up_panels, down_panels;  // of a task
    int64_t combine_rows;                 // of a task
};

struct GatedCall {
    Activation activation;
    bool bf16;
    const void* x;
    int64_t rows, width;
    void* out;
    int64_t rows_per_task;
};

}  // namespace asyncmoe
