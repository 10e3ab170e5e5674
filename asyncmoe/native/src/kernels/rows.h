// Rows as the kernels multiply them.
#pragma once

#include <cstdint>

#include "packed.h"
#include "scratch.h"

namespace asyncmoe {

// Floats for weights of float32; floats, or pairs of bfloat16, for weights of bfloat16; for weights
// of int8 what `packed.h` says.
struct PreparedRows {
    const char* data;
    int64_t stride;  // bytes from one row to the next

    const void* row(int64_t i) const { return data + i * stride; }
};

// Whether rows for weights of this storage are pairs of bfloat16, with the instruction set in use.
bool multiplies_pairs(Storage storage);

// `count` rows of `inputs` elements, bfloat16 or float32, `stride` elements from one to the next,
// for products with weights of this storage. They are copied to `scratch`, unless kernels can read
// them where they are.
PreparedRows prepare_rows(const void* x, bool bf16, int64_t count, int64_t stride, int64_t inputs,
                          Storage storage, Scratch& scratch);

}  // namespace asyncmoe
