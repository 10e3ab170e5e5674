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
};

// x [rows, inputs], `stride` elements from one row to the next -> out [rows, columns].
void linear(const LinearLayer& layer, const void* x, int64_t rows, int64_t stride, void* out);

// The largest power of two of panels, up to `most`, that leaves every thread some tasks to take.
int64_t panels_per_task(int64_t panels, int64_t least, int64_t most);

}  // namespace asyncmoe
