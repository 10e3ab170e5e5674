// Asking the caches for what is about to be read. While the device computes, its kernels push the
// tables out; lines that are asked for together come in the time of one.
#pragma once

#include <cstddef>

namespace columns {

constexpr size_t kLineBytes = 64;

// The elements of arrays at one index: those whose lines `before`, the index before, has not
// asked for; -1: there was none.
template <typename Index, typename... T>
inline void prefetch_at(Index index, Index before, const T*... of_arrays) {
    const auto ask = [&](const auto* array) {
        constexpr size_t kEach = kLineBytes / sizeof *array;
        const auto line_of = [](Index i) { return static_cast<size_t>(i) / kEach; };
        if (line_of(index) != line_of(before)) __builtin_prefetch(array + index, 1);
    };
    (ask(of_arrays), ...);
}

}  // namespace columns
