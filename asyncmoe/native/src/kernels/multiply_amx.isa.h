// Products of bfloat16 rows with panels of weights, on the matrix tiles of Intel CPUs (AMX).
//
// A tile register holds up to 16 rows of 64 bytes. 16 steps of a panel fill one as they lie in
// memory, and rows are laid out so that 16 steps of up to 16 of them do. An output is a sum over
// tiles in ascending order of the inputs, and within a tile nothing passes from row to row, so that
// a row's result does not depend on the other rows.

constexpr int kRegisterRows = 16;
constexpr int64_t kRegisterSteps = 16, kStepBytes = 64, kRegisterBytes = 1024;

// What is fetched ahead of its use. At the end of panels that are multiplied together that is the
// beginning of those behind them.
constexpr int64_t kAheadBytes = 2048;

// The operand of `ldtilecfg`. Registers 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights.
struct alignas(64) RegisterShapes {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16];

    RegisterShapes(uint8_t first, uint8_t second)
        : rows{first, first, second, second, first, second, kRegisterRows, kRegisterRows} {}
};

// The macros of <immintrin.h> tell the compiler too little about the memory that they read.
template <int TO>
ASYNCMOE_INLINE void load_register(const char* from) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(int64_t{64}), "i"(TO) : "memory");
}

template <int FROM>
ASYNCMOE_INLINE void store_register(float* to) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(int64_t{64}), "i"(FROM)
                 : "memory");
}

template <int SUM, int X, int W>
ASYNCMOE_INLINE void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
}

int64_t registers_of(int64_t steps) { return (steps + kRegisterSteps - 1) / kRegisterSteps; }

// Rows -> [registers][count][64 bytes], zeros behind the last step.
void lay_out(const void* const* rows, int count, int64_t steps, char* out) {
    for (int r = 0; r < count; ++r) {
        const char* from = (const char*)rows[r];
        char* to = out + r * 64;
        int64_t left = steps;
        for (; left >= kRegisterSteps; left -= kRegisterSteps, from += 64, to += count * 64)
            __builtin_memcpy(to, from, 64);
        if (left > 0)
            _mm512_store_si512(to, _mm512_maskz_loadu_epi32((__mmask16)((1 << left) - 1), from));
    }
}

RowTile::RowTile(const void* const* rows, int count, const Packed& weight)
    : first(count <= kRegisterRows ? count : (count + 1) / 2), second(count - first) {
    if (count == 1) {
        laid = (const char*)rows[0];
        return;
    }
    const int64_t row_bytes = registers_of(weight.steps()) * 64;
    char* out = laid_rows_memory(count * row_bytes);
    lay_out(rows, first, weight.steps(), out);
    lay_out(rows + first, second, weight.steps(), out + first * row_bytes);
    laid = out;
    // For each tile anew: others may shape registers on this thread too.
    const RegisterShapes shapes((uint8_t)first, (uint8_t)(second > 0 ? second : first));
    asm volatile("ldtilecfg %0" ::"m"(shapes));
}

RowTile::~RowTile() { asm volatile("tilerelease"); }

// A panel's sums are in register PANEL and, of the second rows, 2 + PANEL.
template <bool TWO, int PANEL>
ASYNCMOE_INLINE void add_panel(const char* w, const char* ahead) {
    for (int64_t i = 0; i < kRegisterBytes; i += 64) __builtin_prefetch(ahead + i);
    load_register<6 + PANEL>(w);
    multiply_add<PANEL, 4, 6 + PANEL>();
    if constexpr (TWO) multiply_add<2 + PANEL, 5, 6 + PANEL>();
}

template <bool TWO, int PANEL>
ASYNCMOE_INLINE void store_panel(const RowTile& tile, float* out) {
    store_register<PANEL>(out);
    if constexpr (TWO) store_register<2 + PANEL>(out + tile.first * kPanel);
}

// Rows of one register or two times one panel or two, `panel` bytes from one to the next.
template <bool TWO, int PANELS>
void multiply_registers(const RowTile& tile, int64_t steps, const char* w, int64_t panel,
                        float* out) {
    asm volatile("tilezero %tmm0\n tilezero %tmm1\n tilezero %tmm2\n tilezero %tmm3");
    const char* first = tile.laid;
    const char* second = first + registers_of(steps) * tile.first * 64;
    const auto add = [&](const char* at, int64_t apart, int64_t ahead) {
        load_register<4>(first), first += tile.first * 64;
        if constexpr (TWO) load_register<5>(second), second += tile.second * 64;
        add_panel<TWO, 0>(at, w + ahead);
        if constexpr (PANELS == 2) add_panel<TWO, 1>(at + apart, w + panel + ahead);
    };
    int64_t left = steps;
    for (; left >= kRegisterSteps; left -= kRegisterSteps, w += kRegisterBytes) {
        const bool last = left <= kAheadBytes / kStepBytes;
        add(w, panel, kAheadBytes + (last ? (PANELS - 1) * panel : 0));
    }
    if (left > 0) {  // in the memory behind them lie no zeros
        alignas(64) char padded[PANELS * kRegisterBytes] = {};
        for (int p = 0; p < PANELS; ++p)
            __builtin_memcpy(padded + p * kRegisterBytes, w + p * panel, left * kStepBytes);
        add(padded, kRegisterBytes, 0);
    }
    store_panel<TWO, 0>(tile, out);
    if constexpr (PANELS == 2) store_panel<TWO, 1>(tile, out + kTileRows * kPanel);
}

#include "multiply_alone.isa.h"

template <bool TWO>
void multiply_panels(const RowTile& tile, const Packed& weight, const char* w, int panels,
                     float* out) {
    const int64_t steps = weight.steps(), panel = weight.panel_bytes();
    int done = 0;
    for (; done + 2 <= panels; done += 2)
        multiply_registers<TWO, 2>(tile, steps, w + done * panel, panel,
                                   out + done * kTileRows * kPanel);
    if (done < panels)
        multiply_registers<TWO, 1>(tile, steps, w + done * panel, panel,
                                   out + done * kTileRows * kPanel);
}

void multiply(const RowTile& tile, const Packed& weight, const char* w, int panels, float* out) {
    if (tile.first == 1) multiply_alone(tile, weight, w, panels, out);
    else if (tile.second > 0) multiply_panels<true>(tile, weight, w, panels, out);
    else multiply_panels<false>(tile, weight, w, panels, out);
}
