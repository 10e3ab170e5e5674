// One decode row against the cache: the query heads of one KV head together, each block read once.
//
// Queries and mixed values are floats in the order of `load_two` on elements of the cache.
//
// Online softmax over tiles of tokens, as in FlashAttention (arXiv:2205.14135). Tiles are counted
// from the first token that the row sees, so that nothing depends on the other rows.

// Where the tokens from `start` on lie: elements from the beginning of K (or V) to `kv_head` there.
inline void token_offsets(const AttentionCall& call, int64_t segment, int64_t start, int count,
                          int kv_head, int64_t* offsets) {
    const int64_t size = call.rows.block_tokens, width = call.layer.dim;
    const int64_t stride = call.layer.kv_heads * width;
    const int64_t* table = call.rows.table + segment * call.rows.table_width + start / size;
    int64_t within = start % size;
    for (int i = 0; i < count; ++within) {
        if (within == size) within = 0, ++table;
        offsets[i++] = (*table * size + within) * stride + kv_head * width;
    }
}

constexpr int kAhead = 24;  // tokens

// Asks for `count` elements from memory.
template <class T>
ASYNCMOE_INLINE void fetch(const T* from, int count) {
    for (int i = 0; i < count; i += 64 / (int)sizeof(T)) __builtin_prefetch(from + i, 0, 3);
}

// Scores of `Heads` queries [Heads, dim] and `count` tokens, [Heads, kDecodeTile], then -inf up to
// a whole vector. `offsets` is filled up to a multiple of 8.
template <class T, int W, int Heads>
ASYNCMOE_INLINE void score(const float* queries, const T* keys, const T* values,
                           const int64_t* offsets, int count, int dim, float* scores) {
    constexpr int Tokens = 8 / Heads;
    for (int t = 0; t < count; t += Tokens) {
        // Tokens of one KV head are too far apart for the hardware to see what comes next.
        for (int i = t; i < t + Tokens; ++i) {
            fetch(keys + offsets[i + kAhead < count ? i + kAhead : i], dim);
            fetch(values + offsets[i], dim);
        }
        F<W> sums[8] = {};  // head by head
        for (int d = 0; d < dim; d += 2 * W) {
            Two<W> key[Tokens];
#pragma GCC unroll 8
            for (int i = 0; i < Tokens; ++i) key[i] = load_two<W>(keys + offsets[t + i] + d);
#pragma GCC unroll 8
            for (int h = 0; h < Heads; ++h) {
                const Two<W> query = load_two<W>(queries + h * dim + d);
#pragma GCC unroll 8
                for (int i = 0; i < Tokens; ++i) sums[h * Tokens + i] += query.a * key[i].a;
#pragma GCC unroll 8
                for (int i = 0; i < Tokens; ++i) sums[h * Tokens + i] += query.b * key[i].b;
            }
        }
        float eight[8];
        store<8>(eight, sums_of_eight<W>(sums));
#pragma GCC unroll 8
        for (int h = 0; h < Heads; ++h)
            __builtin_memcpy(scores + h * kDecodeTile + t, eight + h * Tokens, Tokens * 4);
    }
    for (int t = count; t % W != 0; ++t)
        for (int h = 0; h < Heads; ++h) scores[h * kDecodeTile + t] = -__builtin_inff();
}

// Makes scores [count, filled with -inf up to a whole vector] weights relative to the maximum so
// far. Returns the factor that brings earlier sums to the new maximum.
template <int W>
ASYNCMOE_INLINE float soften(float* scores, int count, float& most, float& total) {
    F<W> high = all<W>(most);
    for (int t = 0; t < count; t += W) high = larger<W>(load<W>(scores + t), high);
    const float now = largest_of<W>(high);
    // Where nothing is seen yet any finite number does; -inf would make NaN of the difference.
    const float base = now == -__builtin_inff() ? 0.0f : now;
    F<W> sum = {};
    for (int t = 0; t < count; t += W) {
        const F<W> weight = exp2_of<W>(load<W>(scores + t) - base);
        store<W>(scores + t, weight);
        sum += weight;
    }
    const float factor = exp2_of<W>(all<W>(most - base))[0];
    total = total * factor + sum_of<W>(sum);
    most = now;
    return factor;
}

// mixed [Heads, dim] at d, `Vectors` wide, = factor * mixed + weights * values.
template <class T, int W, int Heads, int Vectors>
ASYNCMOE_INLINE void mix(const float* weights, const T* values, const int64_t* offsets, int count,
                         int dim, int d, const float* factor, float* mixed) {
    F<W> sums[Heads][Vectors];
#pragma GCC unroll 8
    for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 8
        for (int i = 0; i < Vectors; ++i)
            sums[h][i] = load<W>(mixed + h * dim + d + i * W) * factor[h];
    for (int t = 0; t < count; ++t) {
        const T* value = values + offsets[t] + d;
        F<W> parts[Vectors];
#pragma GCC unroll 8
        for (int i = 0; i < Vectors; i += 2) {
            const Two<W> part = load_two<W>(value + i * W);
            parts[i] = part.a, parts[i + 1] = part.b;
        }
#pragma GCC unroll 8
        for (int h = 0; h < Heads; ++h) {
            const F<W> weight = all<W>(weights[h * kDecodeTile + t]);
#pragma GCC unroll 8
            for (int i = 0; i < Vectors; ++i) sums[h][i] += weight * parts[i];
        }
    }
#pragma GCC unroll 8
    for (int h = 0; h < Heads; ++h)
#pragma GCC unroll 8
        for (int i = 0; i < Vectors; ++i) store<W>(mixed + h * dim + d + i * W, sums[h][i]);
}

// One tile of tokens for `Heads` query heads.
template <class T, int W, int Heads>
void attend_tile(const AttentionCall& call, const float* queries, const int64_t* offsets, int count,
                 float* mixed, float* most, float* total) {
    constexpr int Vectors = 8 / Heads;
    const int dim = call.layer.dim;
    float scores[Heads * kDecodeTile], factor[Heads];
    score<T, W, Heads>(queries, (const T*)call.keys, (const T*)call.values, offsets, count, dim,
                       scores);
    for (int h = 0; h < Heads; ++h)
        factor[h] = soften<W>(scores + h * kDecodeTile, count, most[h], total[h]);
    int d = 0;
    for (; d + Vectors * W <= dim; d += Vectors * W)
        mix<T, W, Heads, Vectors>(scores, (const T*)call.values, offsets, count, dim, d, factor,
                                  mixed);
    for (; d < dim; d += 2 * W)
        mix<T, W, Heads, 2>(scores, (const T*)call.values, offsets, count, dim, d, factor, mixed);
}

// The sum of a head's weights, the sink's among them.
ASYNCMOE_INLINE float with_sink(const AttentionLayer& layer, int head, float most, float total) {
    if (layer.sinks == nullptr) return total;
    return total + __builtin_exp2f(layer.sinks[head] * kLog2e - most);
}

template <class T, int W>
void decode_heads(const AttentionCall& call, int64_t row, int kv_head, float* scratch) {
    const AttentionLayer& layer = call.layer;
    const int dim = layer.dim, group = layer.group(), width = group * dim;
    float *queries = scratch, *mixed = queries + width;
    float *most = mixed + width, *total = most + group;
    const T* q = (const T*)call.qkv + row * layer.row_width() + (int64_t)kv_head * width;
    const float scale = layer.scale * kLog2e;
    for (int i = 0; i < width; i += 2 * W) {
        const Two<W> v = load_two<W>(q + i);
        store_two<W>(queries + i, Two<W>{v.a * scale, v.b * scale});
        store_two<W>(mixed + i, Two<W>{});
    }
    for (int h = 0; h < group; ++h) most[h] = -__builtin_inff(), total[h] = 0;
    const int64_t context = call.rows.context[row];
    int64_t start = layer.window > 0 && context > layer.window ? context - layer.window : 0;
    for (; start < context; start += kDecodeTile) {
        const int count = context - start < kDecodeTile ? context - start : kDecodeTile;
        int64_t offsets[kDecodeTile + 7];
        token_offsets(call, row, start, count, kv_head, offsets);
        for (int i = count; i % 8 != 0; ++i) offsets[i] = offsets[count - 1];
        for (int i = 0; i < kAhead && i < count; ++i) fetch((const T*)call.keys + offsets[i], dim);
        int h = 0;
        for (; h + 4 <= group; h += 4)
            attend_tile<T, W, 4>(call, queries + h * dim, offsets, count, mixed + h * dim, most + h,
                                 total + h);
        for (; h + 2 <= group; h += 2)
            attend_tile<T, W, 2>(call, queries + h * dim, offsets, count, mixed + h * dim, most + h,
                                 total + h);
        for (; h < group; ++h)
            attend_tile<T, W, 1>(call, queries + h * dim, offsets, count, mixed + h * dim, most + h,
                                 total + h);
    }
    T* out = (T*)call.out + (row * layer.heads + (int64_t)kv_head * group) * dim;
    for (int h = 0; h < group; ++h) {
        const float whole = with_sink(layer, kv_head * group + h, most[h], total[h]);
        for (int d = 0; d < dim; d += 2 * W) {
            const Two<W> v = load_two<W>(mixed + h * dim + d);
            store_two<W>(out + h * dim + d, Two<W>{v.a / whole, v.b / whole});
        }
    }
}

template <class T>
void decode_task(const AttentionCall& call, int64_t row, int kv_head, float* scratch) {
    const int dim = call.layer.dim;
    if (dim % (2 * kWidth) == 0) decode_heads<T, kWidth>(call, row, kv_head, scratch);
    else if (dim % 16 == 0) decode_heads<T, 8>(call, row, kv_head, scratch);
    else decode_heads<T, 4>(call, row, kv_head, scratch);
}
