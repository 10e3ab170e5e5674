// Whole decoder layers in one call: what Python does between small kernels takes a decode step of
// one row longer than the kernels themselves.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "clock.h"
#include "experts.h"
#include "homelayer.h"
#include "scratch.h"

namespace asyncmoe {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// What a layer of a passage finds in memory, as Python passes it: a row of int64s.
struct LayerMemory {
    int64_t keys, values, blocks, angles, angle_rows;  // of `AttentionStore`
    int64_t local, ids;                                // of `Choice`

    AttentionStore store() const {
        return {at<void>(keys), at<void>(values), blocks, at<const void>(angles), angle_rows};
    }

    const int64_t* local_ids() const { return at<const int64_t>(local); }
};

struct PassageLayer {
    HomeLayer home;
    ExpertsLayer experts;

    int64_t top_k() const { return home.router.call.top_k; }
    int64_t row_bytes() const { return home.hidden() * (home.bf16() ? 2 : 4); }

    // Memory of this thread for what the home's part gives of `rows` rows.
    HomeResult results(int64_t rows) const {
        thread_local Scratch residual, hidden, experts, weights;
        return {residual.take<char>(rows * row_bytes()), hidden.take<char>(rows * row_bytes()),
                experts.take<int64_t>(rows * top_k()), weights.take<float>(rows * top_k())};
    }
};

struct Layers {
    std::vector<PassageLayer> all;

    int64_t count() const { return static_cast<int64_t>(all.size()); }

    void add(const HomeLayer& home, const ExpertsLayer& experts) {
        if (home.hidden() != experts.gate_up.inputs || home.bf16() != experts.bf16)
            throw std::invalid_argument("the experts do not fit their layer");
        all.push_back({home, experts});
    }

    // x [rows, hidden] through layers from `first` on, to which `memory` has `count` rows, into
    // `out`, which may be x. Stops before a layer when `wanted()` is true. Seconds of each stage,
    // attention and experts in turn. Returns how many layers it went through.
    template <class Wanted>
    int64_t pass(const PagedRows& rows, const void* x, const int64_t* angle, int64_t first,
                 int64_t count, const LayerMemory* memory, const Wanted& wanted, void* out,
                 double* seconds) const {
        if (first < 0 || count < 1 || first + count > this->count())
            throw std::out_of_range("no such layers");
        double begin_s = now_s();
        for (int64_t i = 0; i < count; ++i) {
            one(all[first + i], rows, i == 0 ? x : out, angle, memory[i], out, begin_s,
                seconds + 2 * i);
            if (i + 1 == count) break;
            if (wanted()) return i + 1;
        }
        return count;
    }

   private:
    static void one(const PassageLayer& layer, const PagedRows& rows, const void* x,
                    const int64_t* angle, const LayerMemory& memory, void* out, double& begin_s,
                    double* seconds) {
        const HomeResult result = layer.results(rows.rows);
        home_layer(layer.home, rows, x, angle, memory.store(), result);
        const double middle_s = now_s();
        routed_experts(layer.experts, result.hidden, rows.rows, layer.home.hidden(),
                       {result.experts, result.weights, layer.top_k(), memory.local_ids(),
                        memory.ids},
                       /*all_here=*/true, result.residual, out);
        const double end_s = now_s();
        seconds[0] = middle_s - begin_s, seconds[1] = end_s - middle_s;
        begin_s = end_s;
    }
};

}  // namespace asyncmoe
