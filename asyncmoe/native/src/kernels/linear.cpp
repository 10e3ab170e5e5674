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

int64_t panels_per_task(const Packed& weight, int64_t times, int64_t least) {
    // Matrix tiles take rows that were laid out for the task: that should be little of its work.
    const int64_t most = product_isa(weight.storage) == Isa::amx_bf16 ? 16 : 8;
    const int64_t goal = weight.panels() * times / (4 * Pool::mine().threads());
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
    call.row_blocks = (rows + kRowsPerTask - 1) / kRowsPerTask;
    call.panels_per_task = panels_per_task(weight, call.row_blocks, 1);
    call.rows_per_task = (rows + call.row_blocks - 1) / call.row_blocks;
    const int64_t groups = (weight.panels() + call.panels_per_task - 1) / call.panels_per_task;
    Pool::mine().run(static_cast<int>(groups * call.row_blocks), [&](int task) {
        ASYNCMOE_ON_PRODUCT_ISA(call.layer.weight.storage, linear_task, call, task);
    });
}

}  // namespace asyncmoe
