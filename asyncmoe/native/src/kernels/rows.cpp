#include "rows.h"

#include <algorithm>
#include <cstring>

#include "bf16.h"
#include "isa.h"
#include "pool.h"

namespace asyncmoe {

struct PrepareCall {
    const void* x;
    bool bf16;  // x is bfloat16, else float32
    int64_t count, stride, inputs;
    bool shrink;  // to int16, else bfloat16 is widened to float32
    char* out;
    int64_t out_stride, rows_per_task;
};

}  // namespace asyncmoe

#define ASYNCMOE_SOURCE "rows.isa.h"
#include "each_isa.h"

namespace asyncmoe {
namespace {

constexpr int64_t kTaskElements = 1 << 15;  // some microseconds
// Behind each row: a vector that is not full ends here, and rows do not all map to one cache set.
constexpr int64_t kSpareBytes = 128;

PreparedRows copied(PrepareCall call, int64_t bytes, Scratch& scratch) {
    call.out_stride = (bytes + 63) / 64 * 64 + kSpareBytes;
    call.out = scratch.take<char>(call.count * call.out_stride);
    call.rows_per_task = std::max<int64_t>(1, kTaskElements / call.inputs);
    Pool::mine().run(
        static_cast<int>((call.count + call.rows_per_task - 1) / call.rows_per_task),
        [&](int task) { ASYNCMOE_ON_ISA(prepare_task, call, task); });
    return {call.out, call.out_stride};
}

PreparedRows padded_pairs(const PrepareCall& call, Scratch& scratch) {
    const int64_t words = (call.inputs + 1) / 2;
    Bf16* out = scratch.take<Bf16>(call.count * words * 2);
    for (int64_t row = 0; row < call.count; ++row) {
        Bf16* to = out + row * words * 2;
        std::memcpy(to, static_cast<const Bf16*>(call.x) + row * call.stride,
                    call.inputs * sizeof(Bf16));
        if (call.inputs % 2 != 0) to[call.inputs] = Bf16{0};
    }
    return {reinterpret_cast<const char*>(out), words * 4};
}

}  // namespace

bool multiplies_pairs(Storage storage) {
    return product_isa(storage) >= Isa::avx512_bf16;
}

PreparedRows prepare_rows(const void* x, bool bf16, int64_t count, int64_t stride, int64_t inputs,
                          Storage storage, Scratch& scratch) {
    PrepareCall call{x, bf16, count, stride, inputs, storage == Storage::int8, nullptr, 0, 0};
    const char* here = static_cast<const char*>(x);
    if (call.shrink) return copied(call, row_blocks(inputs) * 4 + inputs * 2, scratch);
    if (!bf16) return {here, stride * 4};
    if (!multiplies_pairs(storage)) return copied(call, inputs * 4, scratch);
    if (inputs % 2 == 0) return {here, stride * 2};
    return padded_pairs(call, scratch);
}

}  // namespace asyncmoe
