// What a call of paged attention is given.
#pragma once

#include <cstdint>

namespace asyncmoe {

// The rows of a batch in segments (`RowBatch` in asyncmoe/model.py), the same for all layers.
struct PagedRows {
    int64_t rows, segments, decode_rows;
    const int64_t* cache_index;  // [rows]
    const int64_t* query_start;  // [segments + 1]
    const int64_t* context;      // [segments]
    const int64_t* table;        // [segments, table_width]
    const int64_t* angle;        // [rows]: row of the angles; null: as many angles as rows
    int64_t table_width, block_tokens;
};

// The constants of one attention layer. Pointers may be null: no such norm, no sinks.
struct AttentionLayer {
    int heads, kv_heads, dim, rotated;  // `rotated` dimensions of each head, the first ones
    int64_t window;                     // positions that a row sees; 0: all
    float scale, clip, eps;             // `clip` bounds q, k and v; 0: unbounded
    const void* q_norm;                 // [heads * dim]: all heads as one vector
    const void* k_norm;                 // [kv_heads * dim]
    const void* head_norm;              // [heads + kv_heads, dim]
    const float* sinks;                 // [heads]

    int64_t row_width() const { return int64_t{heads + 2 * kv_heads} * dim; }
    int group() const { return heads / kv_heads; }
};

struct AttentionCall {
    AttentionLayer layer;
    PagedRows rows;
    void* qkv;           // [rows, heads + 2 * kv_heads, dim]; q is normed and rotated in place
    const void* angles;  // [angle rows, 2, rotated]: cosines, and sines, half of them negated
    void* keys;          // [blocks, block_tokens, kv_heads, dim]
    void* values;
    void* out;  // [rows, heads, dim]
};

// What a call finds where the layers of a stage share it.
struct AttentionStore {
    void* keys;  // as in AttentionCall
    void* values;
    int64_t blocks;
    const void* angles;
    int64_t angle_rows;
};

// A layer with the dtype of its rows, cache and angles: bfloat16 or float32.
struct AttentionKernel {
    AttentionLayer layer;
    bool bf16;

    // qkv [rows, row_width], which is changed -> out [rows, heads * dim].
    // Throws std::out_of_range for an index that is not in the cache or the angles.
    void operator()(PagedRows rows, const int64_t* angle, void* qkv, void* out,
                    const AttentionStore& store) const;
};

// Consecutive rows of one prefill segment that attend together.
struct PrefillTile {
    int64_t segment, first, rows;  // `first` row of the batch
};

constexpr float kLog2e = 1.44269504f;
constexpr int kDecodeTile = 128;  // tokens whose scores are held at a time
constexpr int kPrefillTile = 64;
constexpr int kPrefillRows = 48;  // query heads times rows that attend together, or one row's heads

}  // namespace asyncmoe
