// The routed experts of one layer: gated MLPs, and weighted sums of their results.
#pragma once

#include <cstdint>

#include "packed.h"

namespace asyncmoe {

enum class Activation : int { silu, relu, gelu, gelu_tanh };

// The weights of one expert; those of the others lie behind them. The panels of `gate_up`
// alternate: 16 columns of the gate, the same 16 of the up projection. `down` takes as many inputs
// as the gate has columns.
struct ExpertsLayer {
    Packed gate_up, down;
    int64_t experts;
    Activation activation;
    bool bf16;            // the model's dtype: of rows, outputs, and of every value in between
    bool round_products;  // to it: weight times output
};

// (row, expert) pairs, sorted by expert.
struct Pairs {
    int64_t count;
    const int64_t* row;      // [count] row of x
    const float* weight;     // [count]
    const int64_t* counts;   // [experts]: pairs of each
    const int64_t* gather;   // [out_rows, gather_width] pairs in summation order; -1: none
    int64_t out_rows, gather_width;
};

// x [rows, hidden], `stride` elements from one row to the next -> out [out_rows, hidden], to which
// `residual`, if it is not null, of the same shape and maybe the same memory, is added after `out`
// would have been rounded.
// Throws std::invalid_argument if an index in `pairs` is out of its range.
void experts(const ExpertsLayer& layer, const void* x, int64_t rows, int64_t stride,
             const Pairs& pairs, const void* residual, void* out);

// What a router chose: k experts of each row, by ids of which `local` gives the index here.
struct Choice {
    const int64_t* experts;  // [rows, k]
    const float* weights;    // [rows, k]
    int64_t k;
    const int64_t* local;    // [ids]; negative: not here
    int64_t ids;
};

// The same for the pairs of a choice -> out [rows, hidden]. Those whose experts are not here are
// left out, unless `all_here`: then they throw std::invalid_argument, as all ids do that are none.
void routed_experts(const ExpertsLayer& layer, const void* x, int64_t rows, int64_t stride,
                    const Choice& choice, bool all_here, const void* residual, void* out);

// x [rows, 2 * width] -> act(gate) * up [rows, width], rounded as torch rounds it.
void gated(Activation activation, bool bf16, const void* x, int64_t rows, int64_t width, void* out);

}  // namespace asyncmoe
