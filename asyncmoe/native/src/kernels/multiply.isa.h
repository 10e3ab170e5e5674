// Products of a few rows with panels of weights: the innermost loops.
//
// An output is one chain of multiply-adds over the inputs in ascending order, whatever the tile
// that it is computed in, so that a row's result does not depend on the other rows.

constexpr int kVectors = kPanel / kWidth;  // of a panel

// Panels taken at once by so many rows: as many sums as registers hold, and enough of them that the
// latency of a multiply-add is hidden.
#if ASYNCMOE_LEVEL >= 2
constexpr int panels_at_once(int rows) { return rows == 1 ? 8 : 4; }
#elif ASYNCMOE_LEVEL == 1
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#else
constexpr int panels_at_once(int rows) { return rows == 1 ? 2 : 1; }
#endif

// What the weights of one panel are in memory (Unit) and in registers. X is an element of the rows
// that are multiplied with them: `kPlanes` of them meet one unit. A Sum is a vector of Out.
struct FloatWeights {
    using Unit = float;
    using X = float;
    using Out = float;
    using Sum = V;
    static constexpr int kPlanes = 1;
    static ASYNCMOE_INLINE V load_units(const Unit* w) { return load<kWidth>(w); }
    static ASYNCMOE_INLINE V plane(V units, int) { return units; }
    static ASYNCMOE_INLINE V spread(const X* x) { return all<kWidth>(*x); }
    static ASYNCMOE_INLINE V multiply_add(V sum, V x, V w) { return x * w + sum; }
};

// Pairs of int8 times pairs of int16 in whole numbers, which take any order.
struct Int8Weights {
    using Unit = int16_t;  // a pair
    using X = int32_t;     // a pair
    using Out = int32_t;
    using Sum = typename Lanes<kWidth>::I;
    static constexpr int kPlanes = 1;
    static ASYNCMOE_INLINE Sum load_units(const Unit* w) {
#if ASYNCMOE_LEVEL >= 2
        return (Sum)_mm512_maskz_cvtepi8_epi16(~(__mmask32)0,
                                               _mm256_loadu_si256((const __m256i*)w));
#elif ASYNCMOE_LEVEL == 1
        return (Sum)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)w));
#else
        typedef int8_t Bytes __attribute__((vector_size(kWidth * 2)));
        typedef int16_t Halves __attribute__((vector_size(kWidth * 4)));
        Bytes bytes;
        __builtin_memcpy(&bytes, w, sizeof bytes);
        return (Sum) __builtin_convertvector(bytes, Halves);
#endif
    }
    static ASYNCMOE_INLINE Sum plane(Sum units, int) { return units; }
    static ASYNCMOE_INLINE Sum spread(const X* x) { return *x - Sum{}; }
    static ASYNCMOE_INLINE Sum multiply_add(Sum sum, Sum x, Sum w) {
#if ASYNCMOE_LEVEL >= 2
        return sum + (Sum)_mm512_madd_epi16((__m512i)x, (__m512i)w);
#elif ASYNCMOE_LEVEL == 1
        return sum + (Sum)_mm256_madd_epi16((__m256i)x, (__m256i)w);
#else
        return sum + (x << 16 >> 16) * (w << 16 >> 16) + (x >> 16) * (w >> 16);
#endif
    }
};

struct Bf16Weights : FloatWeights {
    using Unit = uint32_t;
    using Units = typename Lanes<kWidth>::U;
    static constexpr int kPlanes = 2;
    static ASYNCMOE_INLINE Units load_units(const Unit* w) {
        Units units;
        __builtin_memcpy(&units, w, sizeof units);
        return units;
    }
    static ASYNCMOE_INLINE V plane(Units units, int i) {
        return i == 0 ? (V)(units << 16) : (V)(units & 0xffff0000u);
    }
};

#if ASYNCMOE_LEVEL == 3
// Two products and two sums in one instruction; the rows stay bfloat16.
struct Bf16Pairs {
    using Unit = uint32_t;
    using X = uint32_t;
    using Out = float;
    using Sum = V;
    static constexpr int kPlanes = 1;
    static ASYNCMOE_INLINE __m512i load_units(const Unit* w) { return _mm512_loadu_si512(w); }
    static ASYNCMOE_INLINE __m512i plane(__m512i units, int) { return units; }
    static ASYNCMOE_INLINE __m512i spread(const X* x) { return _mm512_set1_epi32((int)*x); }
    static ASYNCMOE_INLINE V multiply_add(V sum, __m512i x, __m512i w) {
        return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
    }
};
using ProductsOfBf16 = Bf16Pairs;
#else
using ProductsOfBf16 = Bf16Weights;
#endif

// What is fetched ahead of its use: a cache line holds the units of a step or two. At the end of a
// tile's panels that is the beginning of those of the next tile, which most often follows.
constexpr int64_t kAheadBytes = 2048;

// ROWS rows times PANELS panels, `panel` units from one to the next -> out [PANELS][kTileRows][16].
// The panels have `left` steps, of which `steps` are taken.
template <class W, int ROWS, int PANELS>
ASYNCMOE_INLINE void tile(const typename W::X* const* rows, int64_t steps, int64_t left,
                          const typename W::Unit* w, int64_t panel, typename W::Out* out) {
    constexpr int kPlanes = W::kPlanes, kSums = PANELS * kVectors;
    using Units = decltype(W::load_units(w));
    using Spread = decltype(W::spread(*rows));
    const typename W::X* x[ROWS];
    for (int r = 0; r < ROWS; ++r) x[r] = rows[r];
    typename W::Sum sums[ROWS][kSums] = {};
    constexpr int64_t kAhead = kAheadBytes / (int64_t)sizeof(*w);
    const int64_t last = left - kAhead / kPanel;  // the first step that is near the panels' end
    int64_t ahead = last < 0 ? kAhead + (PANELS - 1) * panel : kAhead;
    for (int64_t step = 0; step < steps; ++step, w += kPanel) {
        if (step == last) ahead += (PANELS - 1) * panel;
        const auto units = [&](int s) {
            return W::load_units(w + s / kVectors * panel + s % kVectors * kWidth);
        };
        for (int p = 0; p < PANELS; ++p)
            __builtin_prefetch(w + p * panel + ahead);
        if constexpr (ROWS == kTileRows) {  // registers hold the units of a step
            Units held[kSums];
            for (int s = 0; s < kSums; ++s) held[s] = units(s);
            for (int i = 0; i < kPlanes; ++i)
                for (int r = 0; r < ROWS; ++r) {
                    const Spread spread = W::spread(x[r] + step * kPlanes + i);
                    for (int s = 0; s < kSums; ++s)
                        sums[r][s] = W::multiply_add(sums[r][s], spread, W::plane(held[s], i));
                }
        } else {  // registers hold the inputs of a step
            for (int i = 0; i < kPlanes; ++i) {
                // Units are loaded again for the second plane, rather than kept and spilled.
                if (i > 0) asm volatile("" ::: "memory");
                Spread held[ROWS];
                for (int r = 0; r < ROWS; ++r) held[r] = W::spread(x[r] + step * kPlanes + i);
                for (int s = 0; s < kSums; ++s) {
                    const auto weights = W::plane(units(s), i);
                    for (int r = 0; r < ROWS; ++r)
                        sums[r][s] = W::multiply_add(sums[r][s], held[r], weights);
                }
            }
        }
    }
    for (int s = 0; s < kSums; ++s)
        for (int r = 0; r < ROWS; ++r) {
            const auto sum = sums[r][s];  // whose address is taken, so that `sums` needs none
            __builtin_memcpy(out + (s / kVectors * kTileRows + r) * kPanel + s % kVectors * kWidth,
                             &sum, sizeof sum);
        }
}

template <class W, int ROWS, int PANELS>
void multiply_panels(const typename W::X* const* rows, int64_t steps, int64_t left,
                     const typename W::Unit* w, int64_t panel, int panels,
                     typename W::Out* out) {
    int done = 0;
    for (; done + PANELS <= panels; done += PANELS)
        tile<W, ROWS, PANELS>(rows, steps, left, w + done * panel, panel,
                              out + done * kTileRows * kPanel);
    if constexpr (PANELS > 1) {
        if (done < panels)
            multiply_panels<W, ROWS, PANELS / 2>(rows, steps, left, w + done * panel, panel,
                                                 panels - done, out + done * kTileRows * kPanel);
    }
}

template <class W, int ROWS = kTileRows>
void multiply_rows(const typename W::X* const* rows, int count, int64_t steps, int64_t left,
                   const typename W::Unit* w, int64_t panel, int panels, typename W::Out* out) {
    if (count == ROWS)
        multiply_panels<W, ROWS, panels_at_once(ROWS)>(rows, steps, left, w, panel, panels, out);
    else if constexpr (ROWS > 1)
        multiply_rows<W, ROWS - 1>(rows, count, steps, left, w, panel, panels, out);
}

template <class W>
void multiply_as(const void* const* rows, int count, const Packed& weight, const char* w,
                 int panels, float* out) {
    const typename W::X* typed[kTileRows];
    for (int r = 0; r < count; ++r) typed[r] = (const typename W::X*)rows[r];
    const int64_t steps = weight.steps();
    multiply_rows<W>(typed, count, steps, steps, (const typename W::Unit*)w, steps * kPanel, panels,
                     out);
}

// Block by block: sums of whole numbers, times the rows' scales, are added up in float32.
void multiply_int8(const void* const* rows, int count, const Packed& weight, const char* w,
                   int panels, float* out) {
    constexpr int64_t kBlockSteps = kBlockInputs / 2;
    const int64_t steps = weight.steps(), blocks = row_blocks(weight.inputs);
    int32_t whole[kTilePanels * kTileRows * kPanel];
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = block * kBlockSteps, left = steps - first;
        const int32_t* pairs[kTileRows];
        for (int r = 0; r < count; ++r) pairs[r] = (const int32_t*)rows[r] + blocks + first;
        multiply_rows<Int8Weights>(pairs, count, left < kBlockSteps ? left : kBlockSteps, left,
                                   (const int16_t*)w + first * kPanel, steps * kPanel, panels,
                                   whole);
        for (int p = 0; p < panels; ++p)
            for (int r = 0; r < count; ++r) {
                const V scale = all<kWidth>(((const float*)rows[r])[block]);
                const int at = (p * kTileRows + r) * kPanel;
                for (int i = at; i < at + kPanel; i += kWidth) {
                    Int8Weights::Sum sum;
                    __builtin_memcpy(&sum, whole + i, sizeof sum);
                    const V part = __builtin_convertvector(sum, V) * scale;
                    store<kWidth>(out + i, block == 0 ? part : load<kWidth>(out + i) + part);
                }
            }
    }
}

void multiply(const RowTile& tile, const Packed& weight, const char* w, int panels, float* out) {
    switch (weight.storage) {
        case Storage::float32:
            return multiply_as<FloatWeights>(tile.rows, tile.count, weight, w, panels, out);
        case Storage::bfloat16:
            return multiply_as<ProductsOfBf16>(tile.rows, tile.count, weight, w, panels, out);
        case Storage::int8: return multiply_int8(tile.rows, tile.count, weight, w, panels, out);
    }
}
