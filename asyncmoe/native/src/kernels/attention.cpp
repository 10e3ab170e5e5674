// Paged attention of one layer in one call: norms, rotation, the cache, decode rows and chunks.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "attention.h"
#include "bf16.h"
#include "isa.h"
#include "pool.h"
#include "scratch.h"

#define ASYNCMOE_SOURCE "attention_rows.isa.h"
#include "each_isa.h"

namespace py = pybind11;

namespace asyncmoe {
namespace {

// Work below this, in multiply-adds or elements, costs less than waking a second thread.
constexpr int64_t kSerialWork = 1 << 16;
constexpr int64_t kPrepareElements = 1 << 13;  // of one task

float* scratch(int64_t floats) {
    thread_local Scratch memory;
    return memory.take<float>(floats);
}

int64_t decode_scratch(const AttentionLayer& layer) {
    return int64_t{layer.group()} * (2 * layer.dim + 2);
}

int64_t prefill_scratch(const AttentionLayer& layer, int64_t rows) {
    return rows * layer.group() * (2 * layer.dim + kPrefillTile + 2) +
           2 * int64_t{layer.dim} * kPrefillTile;
}

template <class Body>
void run(int64_t tasks, int64_t work, const Body& body) {
    if (work < kSerialWork)
        for (int task = 0; task < tasks; ++task) body(task);
    else
        Pool::mine().run(static_cast<int>(tasks), body);
}

// Prefill segments cut into tiles of nearly equal size, late rows first: they take longest.
std::vector<PrefillTile> prefill_tiles(const PagedRows& rows, int group) {
    std::vector<PrefillTile> tiles;
    const int64_t most = std::max(1, kPrefillRows / group);
    for (int64_t segment = rows.decode_rows; segment < rows.segments; ++segment) {
        const int64_t begin = rows.query_start[segment], end = rows.query_start[segment + 1];
        const int64_t count = (end - begin + most - 1) / most;
        const int64_t size = count == 0 ? 0 : (end - begin + count - 1) / count;
        for (int64_t first = begin + (count - 1) * size; first >= begin && size > 0; first -= size)
            if (first < end) tiles.push_back({segment, first, std::min(size, end - first)});
    }
    return tiles;
}

// Multiply-adds of the scores, as an estimate of how long the call takes.
int64_t attention_work(const AttentionCall& call) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < call.rows.segments; ++i)
        tokens += (call.rows.query_start[i + 1] - call.rows.query_start[i]) * call.rows.context[i];
    return tokens * call.layer.heads * call.layer.dim;
}

template <class T>
void attend(const AttentionCall& call) {
    const PagedRows& rows = call.rows;
    const int kv_heads = call.layer.kv_heads;
    const int64_t per_task = std::max<int64_t>(1, kPrepareElements / call.layer.row_width());
    run((rows.rows + per_task - 1) / per_task, rows.rows * call.layer.row_width(), [&](int task) {
        const int64_t first = task * per_task, end = std::min(first + per_task, rows.rows);
        ASYNCMOE_ON_ISA(prepare_rows<T>, call, first, end);
    });
    const auto tiles = prefill_tiles(rows, call.layer.group());
    const int64_t chunk_tasks = static_cast<int64_t>(tiles.size()) * kv_heads;
    run(chunk_tasks + rows.decode_rows * kv_heads, attention_work(call), [&](int task) {
        const int head = task % kv_heads;
        if (task < chunk_tasks) {
            const PrefillTile& tile = tiles[task / kv_heads];
            float* memory = scratch(prefill_scratch(call.layer, tile.rows));
            ASYNCMOE_ON_ISA(prefill_task<T>, call, tile, head, memory);
        } else {
            float* memory = scratch(decode_scratch(call.layer));
            ASYNCMOE_ON_ISA(decode_task<T>, call, (task - chunk_tasks) / kv_heads, head, memory);
        }
    });
}

// -- what Python sees -----------------------------------------------------------------------------

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void check(bool right, const char* wrong) {
    if (!right) throw std::out_of_range(wrong);
}

PagedRows make_rows(int64_t rows, int64_t segments, int64_t decode_rows, uintptr_t cache_index,
                    uintptr_t query_start, uintptr_t context, uintptr_t table, int64_t table_width,
                    int64_t block_tokens) {
    PagedRows made{rows,
                   segments,
                   decode_rows,
                   pointer<const int64_t>(cache_index),
                   pointer<const int64_t>(query_start),
                   pointer<const int64_t>(context),
                   pointer<const int64_t>(table),
                   nullptr,
                   table_width,
                   block_tokens};
    check(block_tokens > 0 && 0 <= decode_rows && decode_rows <= segments, "decode_rows");
    check(made.query_start[0] == 0 && made.query_start[segments] == rows, "query_start");
    for (int64_t i = 0; i < segments; ++i) {
        const int64_t own = made.query_start[i + 1] - made.query_start[i];
        check(own == 1 || (own >= 0 && i >= decode_rows), "query_start");
        check(made.context[i] >= own && made.context[i] <= table_width * block_tokens,
              "context_len");
    }
    return made;
}

void check_blocks(const PagedRows& rows, int64_t blocks) {
    for (int64_t i = 0; i < rows.segments; ++i) {
        const int64_t* table = rows.table + i * rows.table_width;
        const int64_t used = (rows.context[i] + rows.block_tokens - 1) / rows.block_tokens;
        for (int64_t j = 0; j < used; ++j)
            check(0 <= table[j] && table[j] < blocks, "a block of block_table is not in the cache");
    }
    for (int64_t row = 0; row < rows.rows; ++row)
        check(0 <= rows.cache_index[row] && rows.cache_index[row] < blocks * rows.block_tokens,
              "a cache_index is not in the cache");
}

AttentionKernel make_layer(bool bf16, int heads, int kv_heads, int dim, int rotated, int64_t window,
                       float scale, float clip, float eps, uintptr_t q_norm, uintptr_t k_norm,
                       uintptr_t head_norm, uintptr_t sinks) {
    if (heads <= 0 || kv_heads <= 0 || heads % kv_heads != 0 || dim <= 0 || dim % 8 != 0 ||
        rotated % 2 != 0 || rotated < 0 || rotated > dim || window < 0)
        throw std::invalid_argument("attention: heads, dimensions or window");
    return {{heads, kv_heads, dim, rotated, window, scale, clip, eps, pointer<const void>(q_norm),
             pointer<const void>(k_norm), pointer<const void>(head_norm),
             pointer<const float>(sinks)},
            bf16};
}

}  // namespace

void AttentionKernel::operator()(PagedRows rows, const int64_t* angle, void* qkv, void* out,
                                 const AttentionStore& store) const {
    rows.angle = angle;
    check(angle != nullptr || store.angle_rows == rows.rows, "angles");
    for (int64_t i = 0; angle != nullptr && i < rows.rows; ++i)
        check(0 <= angle[i] && angle[i] < store.angle_rows,
              "a position is beyond the rotary table");
    check_blocks(rows, store.blocks);
    const AttentionCall call{layer, rows, qkv, store.angles, store.keys, store.values, out};
    if (bf16) attend<Bf16>(call);
    else attend<float>(call);
}

}  // namespace asyncmoe

void bind_attention(py::module_& m) {
    using namespace asyncmoe;
    py::class_<PagedRows>(m, "PagedRows", "The rows of a batch; see `RowBatch`.")
        .def(py::init(&make_rows), py::arg("rows"), py::arg("segments"), py::arg("decode_rows"),
             py::arg("cache_index"), py::arg("query_start"), py::arg("context_len"),
             py::arg("block_table"), py::arg("table_width"), py::arg("block_tokens"));
    py::class_<AttentionKernel>(m, "AttentionLayer", "The constants of one layer's attention.")
        .def(py::init(&make_layer), py::arg("bf16"), py::arg("heads"), py::arg("kv_heads"),
             py::arg("dim"), py::arg("rotated"), py::arg("window"), py::arg("scale"),
             py::arg("clip"), py::arg("eps"), py::arg("q_norm"), py::arg("k_norm"),
             py::arg("head_norm"), py::arg("sinks"))
        .def("__call__",
             [](const AttentionKernel& kernel, const PagedRows& rows, uintptr_t qkv,
                uintptr_t angle, uintptr_t out, uintptr_t keys, uintptr_t values, int64_t blocks,
                uintptr_t angles, int64_t angle_rows) {
                 kernel(rows, pointer<const int64_t>(angle), pointer<void>(qkv),
                        pointer<void>(out),
                        {pointer<void>(keys), pointer<void>(values), blocks,
                         pointer<const void>(angles), angle_rows});
             },
             py::arg("rows"), py::arg("qkv"), py::arg("angle"), py::arg("out"), py::arg("keys"),
             py::arg("values"), py::arg("blocks"), py::arg("angles"), py::arg("angle_rows"),
             py::call_guard<py::gil_scoped_release>(),
             "Norms and rotates q and k, writes K and V to the cache, attends; qkv is changed.");
}
