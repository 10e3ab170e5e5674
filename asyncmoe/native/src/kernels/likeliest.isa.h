// The place of the largest of many numbers, for one instruction set.

#include "vec.isa.h"

// The largest of `count` numbers, and whether any is NaN.
ASYNCMOE_INLINE float largest_of_block(const float* x, int64_t count, bool* is_nan) {
    constexpr int W = kWidth, kChains = 4;  // as many as hide how long a comparison takes
    F<W> most[kChains];
    typename Lanes<W>::I nan{};
    for (F<W>& each : most) each = all<W>(x[0]);
    int64_t i = 0;
    for (; i + kChains * W <= count; i += kChains * W) {
        for (int chain = 0; chain < kChains; ++chain) {
            const F<W> here = load<W>(x + i + chain * W);
            nan |= here != here;
            most[chain] = here > most[chain] ? here : most[chain];
        }
    }
    float largest = x[0];
    bool any = false;
    for (const F<W>& each : most)
        for (int lane = 0; lane < W; ++lane) largest = each[lane] > largest ? each[lane] : largest;
    for (int lane = 0; lane < W; ++lane) any |= nan[lane] != 0;
    for (; i < count; ++i) {
        any |= x[i] != x[i];
        largest = x[i] > largest ? x[i] : largest;
    }
    *is_nan = any;
    return largest;
}

// See likeliest.h.
inline int64_t likeliest_on_isa(const float* x, int64_t count) {
    constexpr int64_t kBlock = 2048;
    int64_t of_best = 0;  // first number of the block that it is in
    float best = x[0];
    for (int64_t first = 0; first < count; first += kBlock) {
        const int64_t size = count - first < kBlock ? count - first : kBlock;
        bool is_nan;
        const float largest = largest_of_block(x + first, size, &is_nan);
        if (is_nan) return -1;
        if (largest > best) best = largest, of_best = first;
    }
    if (!(best - best == 0)) return -1;  // infinite
    while (x[of_best] != best) ++of_best;
    return of_best;
}
