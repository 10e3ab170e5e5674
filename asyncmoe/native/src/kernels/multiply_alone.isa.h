// One bfloat16 row times panels in vectors of floats: what `tdpbf16ps` gives for it, bit for bit.
//
// A row alone costs what reading the weights does, and many panels side by side are read faster
// than tiles one behind the other. The instruction adds up the even and the odd inputs of 16 steps
// in a chain of multiply-adds each, and both to the sum; denormal numbers are zeros to it.

template <int PANELS>
ASYNCMOE_INLINE void multiply_panels_alone(const uint32_t* x, int64_t steps, const char* w,
                                           int64_t panel, float* out) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    V sums[PANELS] = {};
    for (int64_t begin = 0; begin < steps; begin += kRegisterSteps) {
        const int64_t left = steps - begin;
        const int64_t end = begin + (left < kRegisterSteps ? left : kRegisterSteps);
        const int64_t ahead =
            kAheadBytes + (left <= kAheadBytes / kStepBytes ? (PANELS - 1) * panel : 0);
        V even[PANELS] = {}, odd[PANELS] = {};
        for (int64_t step = begin; step < end; ++step, w += kStepBytes) {
            const __m512i pair = _mm512_set1_epi32((int)x[step]);
            const V x_even = (V)_mm512_maskz_slli_epi32(~(__mmask16)0, pair, 16);
            const V x_odd = (V)(pair & upper);
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; ++p) {
                __builtin_prefetch(w + p * panel + ahead);
                const __m512i units = _mm512_loadu_si512(w + p * panel);
                const V w_even = (V)_mm512_maskz_slli_epi32(~(__mmask16)0, units, 16);
                even[p] = (V)_mm512_fmadd_ps(x_even, w_even, even[p]);
                odd[p] = (V)_mm512_fmadd_ps(x_odd, (V)(units & upper), odd[p]);
            }
        }
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; ++p) sums[p] = sums[p] + (even[p] + odd[p]);
    }
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; ++p) store<kWidth>(out + p * kTileRows * kPanel, sums[p]);
}

template <int PANELS>
__attribute__((noinline)) void multiply_alone(const uint32_t* x, int64_t steps, const char* w,
                                              int64_t panel, int panels, float* out) {
    int done = 0;
    for (; done + PANELS <= panels; done += PANELS)
        multiply_panels_alone<PANELS>(x, steps, w + done * panel, panel,
                                      out + done * kTileRows * kPanel);
    if constexpr (PANELS > 1) {
        if (done < panels)
            multiply_alone<PANELS / 2>(x, steps, w + done * panel, panel, panels - done,
                                       out + done * kTileRows * kPanel);
    }
}

void multiply_alone(const RowTile& tile, const Packed& weight, const char* w, int panels,
                    float* out) {
    constexpr unsigned kZeroDenormals = 0x8040;  // as operands and as results
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | kZeroDenormals);
    multiply_alone<kTilePanels>((const uint32_t*)tile.laid, weight.steps(), w, weight.panel_bytes(),
                                panels, out);
    _mm_setcsr(before);
}
