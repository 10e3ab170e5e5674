#include "vec.isa.h"
#include "norm.isa.h"

template <class T>
void norm_task(const NormCall& call, int task) {
    const int64_t first = (int64_t)task * call.rows_per_task;
    const int64_t end = std::min(first + call.rows_per_task, call.rows);
    for (int64_t row = first; row < end; ++row) {
        const int64_t at = row * call.width;
        const T* x = (const T*)call.x + at;
        if (call.y != nullptr) {
            T* sum = (T*)call.sum + at;
            add<T>(x, (const T*)call.y + at, sum, call.width);
            x = sum;
        }
        rms_norm<T>(x, (const T*)call.weight, (T*)call.out + at, call.width, call.eps);
    }
}
