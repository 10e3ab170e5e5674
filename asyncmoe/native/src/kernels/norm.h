// RMS norm of rows, alone or after adding to the residual.
#pragma once

#include <cstdint>

namespace asyncmoe {

// sum = x + y (if y is not null), out = weight * rms_norm(sum or x); all [rows, width].
struct NormCall {
    const void* x;
    const void* y;  // null: nothing to add
    void* sum;      // of x and y; may be either
    const void* weight;
    void* out;  // may be x, if nothing is added
    int64_t rows;
    int width;
    float eps;
    int rows_per_task;  // filled in by `norm`
};

// Elements are bfloat16 or float32.
void norm(NormCall call, bool bf16);

}  // namespace asyncmoe
