// Rows of a model's dtype into rows for products, for one instruction set.
#include "vec.isa.h"

using V = F<kWidth>;

// bfloat16 -> floats, and a zero behind the last of them for the pair of an odd input.
ASYNCMOE_INLINE void widen_row(const Bf16* x, int64_t inputs, float* out) {
    int64_t i = 0;
    for (; i + kWidth <= inputs; i += kWidth) store<kWidth>(out + i, load<kWidth>(x + i));
    // There is room for a whole vector behind the inputs.
    if (i < inputs) store<kWidth>(out + i, load_some<kWidth>(x + i, (int)(inputs - i)));
    else out[i] = 0.0f;
}

// Up to a block of numbers -> int16 and their scale, which is NaN if not all of them are finite.
template <class T>
ASYNCMOE_INLINE float shrink_block(const T* x, int64_t inputs, int16_t* out) {
    typedef int16_t Halves __attribute__((vector_size(kWidth * 2)));
    typedef typename Lanes<kWidth>::I I;
    V values[kBlockInputs / kWidth];
    V most{}, nothing{};
    const int vectors = (int)((inputs + kWidth - 1) / kWidth);
    for (int j = 0; j < vectors; ++j) {
        const int left = (int)(inputs - j * kWidth);
        values[j] = left >= kWidth ? load<kWidth>(x + j * kWidth)
                                   : load_some<kWidth>(x + j * kWidth, left);
        const V size = values[j] < 0.0f ? -values[j] : values[j];
        most = size > most ? size : most;
        nothing = nothing + values[j] * 0.0f;
    }
    const float largest = largest_of<kWidth>(most);
    const V steps = all<kWidth>(largest > 1e-30f ? 32767.0f / largest : 0.0f);
    for (int j = 0; j < vectors; ++j) {
        const V step = values[j] * steps;
        const V nearest = step + (step < 0.0f ? all<kWidth>(-0.5f) : all<kWidth>(0.5f));
        const Halves halves = __builtin_convertvector(__builtin_convertvector(nearest, I), Halves);
        __builtin_memcpy(out + j * kWidth, &halves, sizeof halves);
    }
    return largest / 32767.0f + sum_of<kWidth>(nothing);
}

template <class T>
ASYNCMOE_INLINE void shrink_row(const T* x, int64_t inputs, char* out) {
    const int64_t blocks = row_blocks(inputs);
    float* scales = (float*)out;
    int16_t* numbers = (int16_t*)(scales + blocks);
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = block * kBlockInputs, left = inputs - first;
        scales[block] = shrink_block(x + first, left < kBlockInputs ? left : kBlockInputs,
                                     numbers + first);
    }
}

void prepare_task(const PrepareCall& call, int task) {
    const int64_t first = task * call.rows_per_task;
    const int64_t end = first + call.rows_per_task < call.count ? first + call.rows_per_task
                                                                : call.count;
    for (int64_t row = first; row < end; ++row) {
        const Bf16* halves = (const Bf16*)call.x + row * call.stride;
        char* out = call.out + row * call.out_stride;
        if (!call.shrink) widen_row(halves, call.inputs, (float*)out);
        else if (call.bf16) shrink_row(halves, call.inputs, out);
        else shrink_row((const float*)call.x + row * call.stride, call.inputs, out);
    }
}
