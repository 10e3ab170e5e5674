#include "pack.h"

#include <algorithm>
#include <cstring>

#include "bf16.h"
#include "pool.h"

namespace asyncmoe {
namespace {

// Columns [column, column + live) of `weight` -> one panel.
void pack_panel(const float* weight, int64_t inputs, int64_t live, float* out) {
    if (live < kPanel) std::fill(out, out + inputs * kPanel, 0.0f);
    for (int64_t c = 0; c < live; ++c)
        for (int64_t i = 0; i < inputs; ++i) out[i * kPanel + c] = weight[c * inputs + i];
}

// The same in pairs of inputs.
template <class T>
void pack_panel(const T* weight, int64_t inputs, int64_t live, T* out) {
    constexpr int64_t kBlock = 16;  // pairs at a time: a cache line for each column
    const int64_t pairs = inputs / 2;
    if (live < kPanel || inputs % 2 != 0)
        std::fill(out, out + (inputs + 1) / 2 * kPanel * 2, T{});
    for (int64_t first = 0; first < pairs; first += kBlock) {
        const int64_t end = std::min(first + kBlock, pairs);
        for (int64_t c = 0; c < live; ++c)
            for (int64_t i = first; i < end; ++i)
                std::memcpy(out + (i * kPanel + c) * 2, weight + c * inputs + i * 2,
                            2 * sizeof(T));
    }
    if (inputs % 2 != 0)
        for (int64_t c = 0; c < live; ++c)
            out[(pairs * kPanel + c) * 2] = weight[c * inputs + inputs - 1];
}

template <class T>
void pack_all(const T* weight, const Packed& shape, T* out, int64_t first, int64_t step) {
    const int64_t size = shape.panel_bytes() / static_cast<int64_t>(sizeof(T));
    Pool::mine().run(static_cast<int>(shape.panels()), [&](int panel) {
        const int64_t column = static_cast<int64_t>(panel) * kPanel;
        const int64_t live = std::min<int64_t>(kPanel, shape.columns - column);
        pack_panel(weight + column * shape.inputs, shape.inputs, live,
                   out + (first + panel * step) * size);
    });
}

}  // namespace

void pack(const void* weight, int64_t columns, int64_t inputs, Storage storage, void* out,
          int64_t first, int64_t step) {
    const Packed shape{storage, nullptr, nullptr, columns, inputs};
    switch (storage) {
        case Storage::float32:
            return pack_all(static_cast<const float*>(weight), shape, static_cast<float*>(out),
                            first, step);
        case Storage::bfloat16:
            return pack_all(static_cast<const Bf16*>(weight), shape, static_cast<Bf16*>(out), first,
                            step);
        case Storage::int8:
            return pack_all(static_cast<const int8_t*>(weight), shape, static_cast<int8_t*>(out),
                            first, step);
    }
}

}  // namespace asyncmoe
