// y = x W^T + b for rows x and packed weights.
#pragma once

#include <cstdint>

#include "packed.h"

namespace asyncmoe {

struct LinearLayer {
    Packed weight;
    const float* bias;  // [panels * 16], or null
    bool bf16_in;       // the rows are bfloat16, else float32
    bool bf16_out;
    bool round;  // to bfloat16 whatever is stored

    // Columns of panels [first, end) alone.
    LinearLayer part(int64_t first, int64_t end) const {
        LinearLayer some = *this;
        some.weight = weight.part(first, end);
        if (bias != nullptr) some.bias += first * kPanel;
        return some;
    }
};

// x [rows, inputs], `stride` elements from one row to the next -> out [rows, columns].
void linear(const LinearLayer& layer, const void* x, int64_t rows, int64_t stride, void* out);

// Panels of a task, where `times` as many as `weight` has are multiplied with rows: a power of two,
// at least `least`, that leaves every thread some tasks to take.
int64_t panels_per_task(const Packed& weight, int64_t times, int64_t least);

}  // namespace asyncmoe
