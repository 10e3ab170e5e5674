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

ASYNCMOE_INLINE void finish_row(const LinearCall& call, int64_t row, int64_t panel, int panels,
                                const float* sums) {
    const int64_t at = row * call.layer.weight.columns;
    for (int p = 0; p < panels; ++p, sums += kTileRows * kPanel) {
        const int64_t column = (panel + p) * kPanel;
        if (call.layer.bf16_out) finish_panel(call.layer, column, sums, (Bf16*)call.out + at);
        else finish_panel(call.layer, column, sums, (float*)call.out + at);
    }
}

void linear_task(const LinearCall& call, int task) {
    const Packed& weight = call.layer.weight;
    const int64_t first = task / call.row_blocks * call.panels_per_task;
    const int64_t left = weight.panels() - first;
    const int64_t last = first + (left < call.panels_per_task ? left : call.panels_per_task);
    int64_t row = task % call.row_blocks * call.rows_per_task;
    const int64_t end = row + call.rows_per_task < call.count ? row + call.rows_per_task
                                                              : call.count;
    float sums[kTilePanels * kTileRows * kPanel];
    while (row < end) {
        const int count = tile_rows(end - row);
        const void* rows[kTileRows];
        for (int r = 0; r < count; ++r) rows[r] = call.rows.row(row + r);
        const RowTile tile(rows, count, weight);
        for (int64_t panel = first; panel < last; panel += kTilePanels) {
            const int panels = (int)(last - panel < kTilePanels ? last - panel : kTilePanels);
            multiply(tile, weight, weight.data + panel * weight.panel_bytes(), panels, sums);
            for (int r = 0; r < count; ++r)
                finish_row(call, row + r, panel, panels, sums + r * kPanel);
        }
        row += count;
    }
}
