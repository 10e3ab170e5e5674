// Residuals and their parts, summed row by row, for one instruction set.
#include "vec.isa.h"

template <class T>
void merge_task(const MergeCall& call, int task) {
    constexpr int S = 2 * kWidth;
    const int64_t first = (int64_t)task * call.rows_per_task;
    const int64_t end = std::min(first + call.rows_per_task, call.rows);
    for (int64_t row = first; row < end; ++row) {
        const int64_t slot = call.slots[row];
        const T* residual = (const T*)call.residual + slot * call.width;
        const T* parts = (const T*)call.parts + slot * call.max_parts * call.width;
        T* out = (T*)call.out + row * call.width;
        for (int i = 0; i < call.width; i += S) {
            const int count = i + S <= call.width ? S : call.width - i;
            Two<kWidth> sum = load_two<kWidth>(residual + i, count);
            for (int part = 0; part < call.counts[row]; ++part) {
                const Two<kWidth> v =
                    load_two<kWidth>(parts + (int64_t)part * call.width + i, count);
                sum.a += v.a, sum.b += v.b;
            }
            store_two<kWidth>(out + i, sum, count);
        }
    }
}
