#include "linear.h"

#include <algorithm>

#include "bf16.h"
#include "isa.h"
#include "linear_tasks.h"
#include "pool.h"

#define ASYNCMOE_BF16_TOO
#define ASYNCMOE_SOURCE "linear.isa.h"
#include "each_isa.h"

namespace asyncmoe {
namespace {

constexpr int64_t kRowsPerTask = 96;

}  // namespace

int64_t panels_per_task(int64_t panels, int64_t least, int64_t most) {
    const int64_t goal = panels / (4 * Pool::mine().threads());
    int64_t size = least;
    while (size * 2 <= std::min(goal, most)) size *= 2;
    return size;
}

void linear(const LinearLayer& layer, const void* x, int64_t rows, int64_t stride, void* out) {
    if (rows == 0) return;
    thread_local Scratch scratch;
    const Packed& weight = layer.weight;
    LinearCall call{};
    call.layer = layer;
    call.rows =
        prepare_rows(x, layer.bf16_in, rows, stride, weight.inputs, weight.storage, scratch);
    call.count = rows;
    call.out = out;
    call.panels_per_task = panels_per_task(weight.panels(), 1, 8);
    call.row_blocks = (rows + kRowsPerTask - 1) / kRowsPerTask;
    call.rows_per_task = (rows + call.row_blocks - 1) / call.row_blocks;
    const int64_t groups = (weight.panels() + call.panels_per_task - 1) / call.panels_per_task;
    const bool pairs = multiplies_pairs(weight.storage);
    Pool::mine().run(static_cast<int>(groups * call.row_blocks), [&](int task) {
#if defined(__x86_64__)
        if (pairs) return avx512_bf16::linear_task(call, task);
#endif
        ASYNCMOE_ON_ISA(linear_task, call, task);
    });
}

}  // namespace asyncmoe
