// The tasks of a linear layer, for one instruction set.
#include "vec.isa.h"
#include "tile.isa.h"

// A panel's results for one row, as they are stored.
template <class T>
ASYNCMOE_INLINE void finish_panel(const LinearLayer& layer, int64_t column, const float* sums,
                                  T* out) {
    const int64_t left = layer.weight.columns - column;
    for (int i = 0; i < kPanel && i < left; i += kWidth) {
        V y = load<kWidth>(sums + i);
        if (layer.weight.scales != nullptr) y = y * load<kWidth>(layer.weight.scales + column + i);
        if (layer.bias != nullptr) y = y + load<kWidth>(layer.bias + column + i);
        if (layer.round) y = rounded<Bf16, kWidth>(y);
        if (left - i >= kWidth) store<kWidth>(out + column + i, y);
        else store_some<kWidth>(out + column + i, y, (int)(left - i));
    }
}

void linear_task(const LinearCall& call, int task) {
    const Packed& weight = call.layer.weight;
    const int64_t panel = task / call.row_blocks * call.panels_per_task;
    const int64_t left = weight.panels() - panel;
    const int panels = (int)(left < call.panels_per_task ? left : call.panels_per_task);
    const char* w = weight.data + panel * weight.panel_bytes();
    int64_t row = task % call.row_blocks * call.rows_per_task;
    const int64_t end = row + call.rows_per_task < call.count ? row + call.rows_per_task
                                                              : call.count;
    float sums[kTilePanels * kTileRows * kPanel];
    while (row < end) {
        const int count = tile_rows(end - row);
        const void* rows[kTileRows];
        for (int r = 0; r < count; ++r) rows[r] = call.rows.row(row + r);
        multiply(rows, count, weight, w, panels, sums);
        for (int r = 0; r < count; ++r)
            for (int p = 0; p < panels; ++p) {
                const float* from = sums + (p * kTileRows + r) * kPanel;
                const int64_t column = (panel + p) * kPanel, at = (row + r) * weight.columns;
                if (call.layer.bf16_out)
                    finish_panel(call.layer, column, from, (Bf16*)call.out + at);
                else finish_panel(call.layer, column, from, (float*)call.out + at);
            }
        row += count;
    }
}
