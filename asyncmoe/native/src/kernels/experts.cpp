#include "experts.h"

#include <algorithm>
#include <stdexcept>

#include "bf16.h"
#include "experts_tasks.h"
#include "isa.h"
#include "linear.h"
#include "pool.h"

#define ASYNCMOE_BF16_TOO
#define ASYNCMOE_SOURCE "experts.isa.h"
#include "each_isa.h"

namespace asyncmoe {
namespace {

constexpr int64_t kTaskElements = 1 << 14;  // of elementwise work: some microseconds

int64_t tasks_of(int64_t total, int64_t per_task) { return (total + per_task - 1) / per_task; }

int64_t rows_per_task(int64_t width) { return std::max<int64_t>(1, kTaskElements / width); }

// What the calls on one thread use again.
struct Workspace {
    Scratch rows, inner, inner_rows, outputs, active, sorted, weights;

    static Workspace& mine() {
        thread_local Workspace workspace;
        return workspace;
    }
};

void check(const ExpertsLayer& layer, int64_t rows, const Pairs& pairs) {
    int64_t sum = 0;
    bool good = true;
    for (int64_t i = 0; i < layer.experts; ++i) {
        good &= pairs.counts[i] >= 0 && pairs.counts[i] <= pairs.count - sum;
        if (!good) break;
        sum += pairs.counts[i];
    }
    if (!good || sum != pairs.count) throw std::invalid_argument("counts do not add up to pairs");
    for (int64_t i = 0; i < pairs.count; ++i) good &= pairs.row[i] >= 0 && pairs.row[i] < rows;
    if (!good) throw std::invalid_argument("a pair's row is out of range");
    for (int64_t i = 0; i < pairs.out_rows * pairs.gather_width; ++i)
        good &= pairs.gather[i] < pairs.count;
    if (!good) throw std::invalid_argument("an output row's pair is out of range");
}

int64_t find_active(const ExpertsLayer& layer, const Pairs& pairs, ActiveExpert* active) {
    int64_t found = 0, first = 0;
    for (int64_t expert = 0; expert < layer.experts; ++expert) {
        const int64_t count = pairs.counts[expert];
        if (count > 0) active[found++] = {expert, first, first + count};
        first += count;
    }
    return found;
}

template <class T>
void run(ExpertsCall& call, int64_t active) {
    const Packed& gate_up = call.layer.gate_up;
    const Packed& down = call.layer.down;
    Pool& pool = Pool::mine();
    call.gate_up_panels = panels_per_task(gate_up, active, 2);
    call.down_panels = panels_per_task(down, active, 1);
    call.combine_rows = rows_per_task(call.output_stride * std::max<int64_t>(
                                                               1, call.pairs.gather_width));
    pool.run(static_cast<int>(active * tasks_of(gate_up.panels(), call.gate_up_panels)),
             [&](int task) {
                 ASYNCMOE_ON_PRODUCT_ISA(gate_up.storage, gate_up_task<T>, call, task);
             });
    call.inner_rows =
        prepare_rows(call.inner, call.inner_bf16, call.pairs.count,
                     call.inner_stride / (call.inner_bf16 ? 2 : 4), down.inputs, down.storage,
                     Workspace::mine().inner_rows);
    pool.run(static_cast<int>(active * tasks_of(down.panels(), call.down_panels)),
             [&](int task) { ASYNCMOE_ON_PRODUCT_ISA(down.storage, down_task<T>, call, task); });
    pool.run(static_cast<int>(tasks_of(call.pairs.out_rows, call.combine_rows)),
             [&](int task) { ASYNCMOE_ON_ISA(combine_task<T>, call, task); });
}

}  // namespace

void experts(const ExpertsLayer& layer, const void* x, int64_t rows, int64_t stride,
             const Pairs& pairs, const void* residual, void* out) {
    check(layer, rows, pairs);
    Workspace& space = Workspace::mine();
    ActiveExpert* active = space.active.take<ActiveExpert>(layer.experts);
    const Packed& down = layer.down;

    ExpertsCall call{};
    call.layer = layer;
    call.pairs = pairs;
    call.active = active;
    call.rows = prepare_rows(x, layer.bf16, rows, stride, layer.gate_up.inputs,
                             layer.gate_up.storage, space.rows);
    call.inner_bf16 = layer.bf16 && multiplies_pairs(down.storage);
    // Some bytes between rows, so that they do not all map to one cache set.
    const int64_t width = layer.gate_up.panels() / 2 * kPanel;
    call.inner_stride = width * (call.inner_bf16 ? 2 : 4) + 64;
    call.inner = space.inner.take<char>(pairs.count * call.inner_stride);
    call.output_stride = down.panels() * kPanel;
    call.outputs = space.outputs.take<float>(pairs.count * call.output_stride);
    call.residual = residual;
    call.out = out;
    const int64_t found = find_active(layer, pairs, active);
    if (layer.bf16) run<Bf16>(call, found);
    else run<float>(call, found);
}

void routed_experts(const ExpertsLayer& layer, const void* x, int64_t rows, int64_t stride,
                    const Choice& choice, bool all_here, const void* residual, void* out) {
    Workspace& space = Workspace::mine();
    const int64_t most = rows * choice.k;
    // Counts of experts, their next free places, rows of pairs, places of pairs.
    int64_t* counts = space.sorted.take<int64_t>(2 * layer.experts + 2 * most);
    int64_t* next = counts + layer.experts;
    int64_t* row = next + layer.experts;
    int64_t* gather = row + most;
    float* weight = space.weights.take<float>(most);
    const auto local = [&](int64_t i) { return choice.local[choice.experts[i]]; };

    std::fill(counts, counts + layer.experts, 0);
    for (int64_t i = 0; i < most; ++i) {
        const int64_t id = choice.experts[i];
        if (id < 0 || id >= choice.ids || local(i) >= layer.experts || (all_here && local(i) < 0))
            throw std::invalid_argument("an expert is not on this rank");
        if (local(i) >= 0) ++counts[local(i)];
    }
    int64_t first = 0;
    for (int64_t expert = 0; expert < layer.experts; ++expert) {
        next[expert] = first;
        first += counts[expert];
    }
    for (int64_t i = 0; i < most; ++i) {
        gather[i] = -1;
        if (local(i) < 0) continue;
        const int64_t place = next[local(i)]++;
        row[place] = i / choice.k;
        weight[place] = choice.weights[i];
        gather[i] = place;
    }
    const Pairs pairs{first, row, weight, counts, gather, rows, choice.k};
    experts(layer, x, rows, stride, pairs, residual, out);
}

void gated(Activation activation, bool bf16, const void* x, int64_t rows, int64_t width,
           void* out) {
    GatedCall call{activation, bf16, x, rows, width, out, rows_per_task(width)};
    const int tasks = static_cast<int>(tasks_of(rows, call.rows_per_task));
    Pool::mine().run(tasks, [&](int task) {
        if (call.bf16) ASYNCMOE_ON_ISA(gated_task<Bf16>, call, task);
        else ASYNCMOE_ON_ISA(gated_task<float>, call, task);
    });
}

}  // namespace asyncmoe
