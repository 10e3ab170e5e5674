// The tasks of an expert layer, for one instruction set. T is the model's dtype.
#include "vec.isa.h"
#include "tile.isa.h"
#include "activation.isa.h"

// Calls finish(pair, panel, panels, sums) for all of an active expert's pairs and, some at a time,
// up to `most` panels from `first` on.
template <class Rows, class Finish>
ASYNCMOE_INLINE void multiply_expert(const Packed& weight, const ActiveExpert& active,
                                     int64_t first, int64_t most, const Rows& row_of,
                                     const Finish& finish) {
    const int64_t left = weight.panels() - first;
    const int64_t last = first + (left < most ? left : most);
    const char* w = weight.data + active.expert * weight.bytes();
    float sums[kTilePanels * kTileRows * kPanel];
    for (int64_t pair = active.first; pair < active.end;) {
        const int count = tile_rows(active.end - pair);
        const void* rows[kTileRows];
        for (int r = 0; r < count; ++r) rows[r] = row_of(pair + r);
        const RowTile tile(rows, count, weight);
        for (int64_t panel = first; panel < last; panel += kTilePanels) {
            const int panels = (int)(last - panel < kTilePanels ? last - panel : kTilePanels);
            multiply(tile, weight, w + panel * weight.panel_bytes(), panels, sums);
            for (int r = 0; r < count; ++r) finish(pair + r, panel, panels, sums + r * kPanel);
        }
        pair += count;
    }
}

// A vector of sums as the value of the model's dtype that the product gives.
template <class T>
ASYNCMOE_INLINE V product_of(const Packed& weight, int64_t expert, int64_t column,
                             const float* sums) {
    V y = load<kWidth>(sums);
    if (weight.scales != nullptr)
        y = y * load<kWidth>(weight.scales + expert * weight.panels() * kPanel + column);
    return rounded<T, kWidth>(y);
}

// act(gate) * up of one pair and some panels.
template <class T, class Inner>
ASYNCMOE_INLINE void finish_gate_up(const ExpertsCall& call, int64_t expert, int64_t pair,
                                    int64_t first, int panels, const float* sums) {
    const Packed& weight = call.layer.gate_up;
    Inner* out = (Inner*)(call.inner + pair * call.inner_stride) + first / 2 * kPanel;
    for (int p = 0; p < panels; p += 2, sums += 2 * kTileRows * kPanel, out += kPanel)
        for (int i = 0; i < kPanel; i += kWidth) {
            const int64_t column = (first + p) * kPanel + i;
            const V gate = product_of<T>(weight, expert, column, sums + i);
            const V up =
                product_of<T>(weight, expert, column + kPanel, sums + kTileRows * kPanel + i);
            store<kWidth>(out + i, gated_of<T>(call.layer.activation, gate, up));
        }
}

template <class T>
void gate_up_task(const ExpertsCall& call, int task) {
    const Packed& weight = call.layer.gate_up;
    const int64_t groups = (weight.panels() + call.gate_up_panels - 1) / call.gate_up_panels;
    const ActiveExpert& active = call.active[task / groups];
    multiply_expert(
        weight, active, task % groups * call.gate_up_panels, call.gate_up_panels,
        [&](int64_t pair) { return call.rows.row(call.pairs.row[pair]); },
        [&](int64_t pair, int64_t first, int panels, const float* sums) {
            if (call.inner_bf16)
                finish_gate_up<T, Bf16>(call, active.expert, pair, first, panels, sums);
            else finish_gate_up<T, float>(call, active.expert, pair, first, panels, sums);
        });
}

template <class T>
void down_task(const ExpertsCall& call, int task) {
    const Packed& weight = call.layer.down;
    const int64_t groups = (weight.panels() + call.down_panels - 1) / call.down_panels;
    const ActiveExpert& active = call.active[task / groups];
    multiply_expert(
        weight, active, task % groups * call.down_panels, call.down_panels,
        [&](int64_t pair) { return call.inner_rows.row(pair); },
        [&](int64_t pair, int64_t first, int panels, const float* sums) {
            float* out = call.outputs + pair * call.output_stride + first * kPanel;
            for (int p = 0; p < panels; ++p, sums += kTileRows * kPanel)
                for (int i = p * kPanel, j = 0; j < kPanel; i += kWidth, j += kWidth)
                    store<kWidth>(out + i, product_of<T>(weight, active.expert,
                                                         first * kPanel + i, sums + j));
        });
}

// The sum of one output row's parts, in float32. Missing parts are left out rather than multiplied
// by zero, which would let a NaN through.
template <class T>
ASYNCMOE_INLINE void combine_row(const ExpertsCall& call, const int64_t* gather, const T* residual,
                                 T* out) {
    const int64_t hidden = call.layer.down.columns;
    for (int64_t column = 0; column < hidden; column += kWidth) {
        V sum{};
        for (int64_t j = 0; j < call.pairs.gather_width; ++j) {
            const int64_t pair = gather[j];
            if (pair < 0) continue;
            const V weight = all<kWidth>(call.pairs.weight[pair]);
            const V output = load<kWidth>(call.outputs + pair * call.output_stride + column);
            if (call.layer.round_products)
                sum = sum + rounded<T, kWidth>(output * rounded<T, kWidth>(weight));
            else sum = sum + output * weight;
        }
        const int left = (int)(hidden - column);
        if (residual != nullptr)
            sum = rounded<T, kWidth>(sum) + (left >= kWidth
                                                 ? load<kWidth>(residual + column)
                                                 : load_some<kWidth>(residual + column, left));
        if (left >= kWidth) store<kWidth>(out + column, sum);
        else store_some<kWidth>(out + column, sum, left);
    }
}

template <class T>
void combine_task(const ExpertsCall& call, int task) {
    const int64_t first = task * call.combine_rows;
    int64_t end = first + call.combine_rows;
    if (end > call.pairs.out_rows) end = call.pairs.out_rows;
    for (int64_t row = first; row < end; ++row) {
        const int64_t at = row * call.layer.down.columns;
        combine_row<T>(call, call.pairs.gather + row * call.pairs.gather_width,
                       call.residual == nullptr ? nullptr : (const T*)call.residual + at,
                       (T*)call.out + at);
    }
}

template <class T>
ASYNCMOE_INLINE void gated_row(Activation activation, const T* gate, const T* up, T* out,
                               int64_t width) {
    int64_t i = 0;
    for (; i + kWidth <= width; i += kWidth)
        store<kWidth>(out + i, gated_of<T>(activation, load<kWidth>(gate + i),
                                           load<kWidth>(up + i)));
    if (const int left = (int)(width - i); left > 0)
        store_some<kWidth>(out + i, gated_of<T>(activation, load_some<kWidth>(gate + i, left),
                                                load_some<kWidth>(up + i, left)), left);
}

template <class T>
void gated_task(const GatedCall& call, int task) {
    const int64_t first = task * call.rows_per_task;
    int64_t end = first + call.rows_per_task;
    if (end > call.rows) end = call.rows;
    for (int64_t row = first; row < end; ++row) {
        const T* gate = (const T*)call.x + row * 2 * call.width;
        gated_row<T>(call.activation, gate, gate + call.width, (T*)call.out + row * call.width,
                     call.width);
    }
}
