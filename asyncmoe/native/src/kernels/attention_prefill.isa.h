// Consecutive rows of one prefill chunk against the cache: the query heads of one KV head of all
// these rows are the rows of two products per tile of tokens.
//
// Tiles of tokens begin at multiples of `kPrefillTile`, so that a row's result does not depend on
// which rows it shares a tile with: tokens that it does not see get a weight of exactly 0.

// K of `count` tokens, as [dim, kPrefillTile] floats; columns past `count` up to a multiple of 8
// repeat the last one, and zeros follow up to `padded`.
template <class T>
void transpose_keys(const T* keys, const int64_t* offsets, int count, int padded, int dim,
                    float* out) {
    int t = 0;
    for (; t < count; t += 8)
        for (int d = 0; d < dim; d += 8) {
            F<8> v[8];
            for (int i = 0; i < 8; ++i) v[i] = load<8>(keys + offsets[t + i] + d);
            transpose_eight(v);
            for (int i = 0; i < 8; ++i) store<8>(out + (d + i) * kPrefillTile + t, v[i]);
        }
    for (; t < padded; t += 8)
        for (int d = 0; d < dim; ++d) store<8>(out + d * kPrefillTile + t, F<8>{});
}

// V of `count` tokens, as [count, dim] floats.
template <class T>
void widen_values(const T* values, const int64_t* offsets, int count, int dim, float* out) {
    for (int t = 0; t < count; ++t)
        for (int d = 0; d < dim; d += 8)
            store<8>(out + t * dim + d, load<8>(values + offsets[t] + d));
}

// The memory of one task, in floats: see `prefill_scratch` in attention.cpp.
struct PrefillSpace {
    float *queries, *mixed, *scores, *keys, *values, *most, *total;

    PrefillSpace(float* at, int rows, int dim) {
        const auto next = [&at](int64_t count) {
            float* here = at;
            at += count;
            return here;
        };
        queries = next((int64_t)rows * dim), mixed = next((int64_t)rows * dim);
        scores = next((int64_t)rows * kPrefillTile);
        keys = next((int64_t)dim * kPrefillTile), values = next((int64_t)dim * kPrefillTile);
        most = next(rows), total = next(rows);
    }
};

// Scores of the tokens from `start` on that the query at `position` does not see become -inf.
ASYNCMOE_INLINE void hide(float* scores, int64_t start, int padded, int64_t position,
                          int64_t window) {
    const int64_t seen = position - start + 1;  // tokens of the tile up to the query's own
    for (int64_t t = seen < 0 ? 0 : seen; t < padded; ++t) scores[t] = -__builtin_inff();
    if (window == 0) return;
    const int64_t oldest = position - window + 1 - start;
    for (int64_t t = 0; t < oldest && t < padded; ++t) scores[t] = -__builtin_inff();
}

template <class T>
void prefill_task(const AttentionCall& call, const PrefillTile& tile, int kv_head, float* scratch) {
    constexpr int W = kWidth;
    const AttentionLayer& layer = call.layer;
    const int dim = layer.dim, group = layer.group(), rows = (int)tile.rows * group;
    const PrefillSpace space(scratch, rows, dim);
    // Row i of the products is query head i % group of the tile's row i / group.
    for (int i = 0; i < rows; ++i) {
        const T* q = (const T*)call.qkv + (tile.first + i / group) * layer.row_width() +
                     (int64_t)(kv_head * group + i % group) * dim;
        for (int d = 0; d < dim; d += 8) {
            store<8>(space.queries + i * dim + d, load<8>(q + d) * (layer.scale * kLog2e));
            store<8>(space.mixed + i * dim + d, F<8>{});
        }
        space.most[i] = -__builtin_inff(), space.total[i] = 0;
    }
    const int64_t after = call.rows.query_start[tile.segment + 1] - tile.first;
    const int64_t position = call.rows.context[tile.segment] - after;  // of the first row
    const int64_t end = position + tile.rows;
    int64_t start = layer.window > 0 ? position - layer.window + 1 : 0;
    start = start < 0 ? 0 : start / kPrefillTile * kPrefillTile;
    for (; start < end; start += kPrefillTile) {
        const int count = end - start < kPrefillTile ? end - start : kPrefillTile;
        const int padded = (count + W - 1) / W * W;
        int64_t offsets[kPrefillTile + 7];
        token_offsets(call, tile.segment, start, count, kv_head, offsets);
        for (int i = count; i % 8 != 0; ++i) offsets[i] = offsets[count - 1];
        transpose_keys<T>((const T*)call.keys, offsets, count, padded, dim, space.keys);
        widen_values<T>((const T*)call.values, offsets, count, dim, space.values);
        matmul(space.queries, dim, space.keys, kPrefillTile, space.scores, kPrefillTile, rows,
               padded, dim, false);
        for (int i = 0; i < rows; ++i) {
            float* scores = space.scores + i * kPrefillTile;
            hide(scores, start, padded, position + i / group, layer.window);
            const float factor = soften<W>(scores, padded, space.most[i], space.total[i]);
            float* mixed = space.mixed + i * dim;
            if (factor != 1.0f)
                for (int d = 0; d < dim; d += 8) store<8>(mixed + d, load<8>(mixed + d) * factor);
        }
        matmul(space.scores, kPrefillTile, space.values, dim, space.mixed, dim, rows, dim, count,
               true);
    }
    for (int i = 0; i < rows; ++i) {
        const int head = kv_head * group + i % group;
        const float whole = with_sink(layer, head, space.most[i], space.total[i]);
        T* out = (T*)call.out + ((tile.first + i / group) * layer.heads + head) * dim;
        for (int d = 0; d < dim; d += 8)
            store<8>(out + d, load<8>(space.mixed + i * dim + d) / whole);
    }
}
