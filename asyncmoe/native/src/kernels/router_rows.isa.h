// The gate's product and softmax for consecutive rows, for one instruction set.
#include "vec.isa.h"
#include "matmul.isa.h"

// probabilities [end - first, columns] of all experts; `x` is memory for as many rows of floats.
template <class T>
void route_rows(const RouteCall& call, int64_t first, int64_t end, float* x, float* scores) {
    constexpr int W = 8;
    const int rows = (int)(end - first), hidden = call.hidden, columns = call.columns;
    const T* from = (const T*)call.x + first * hidden;
    for (int64_t i = 0; i < (int64_t)rows * hidden; i += W) {
        const int64_t rest = (int64_t)rows * hidden - i;
        if (rest >= W) store<W>(x + i, load<W>(from + i));
        else store_some<W>(x + i, load_some<W>(from + i, rest), rest);
    }
    matmul(x, hidden, call.gate, columns, scores, columns, rows, columns, hidden, false);
    for (int row = 0; row < rows; ++row) {
        float* p = scores + (int64_t)row * columns;
        F<W> most = all<W>(-__builtin_inff()), sum = {};
        for (int i = 0; i < columns; i += W) {
            // The bias of missing columns is -inf: they get a share of exactly 0.
            const F<W> logit = rounded<T, W>(load<W>(p + i) + load<W>(call.bias + i));
            store<W>(p + i, logit);
            most = larger<W>(logit, most);
        }
        const float base = largest_of<W>(most);
        for (int i = 0; i < columns; i += W) {
            const F<W> share = exp2_of<W>((load<W>(p + i) - base) * kLog2e);
            store<W>(p + i, share);
            sum += share;
        }
        const float total = sum_of<W>(sum);
        for (int i = 0; i < columns; i += W) store<W>(p + i, load<W>(p + i) / total);
    }
}
