// Between the product that makes q, k, v and attention: norms, clip, rotation, writing the cache.

template <class T>
ASYNCMOE_INLINE void clip(T* x, int64_t count, float bound) {
    constexpr int W = 8;  // count is a multiple
    for (int64_t i = 0; i < count; i += W) {
        const F<W> v = load<W>(x + i);
        store<W>(x + i, v < -bound ? all<W>(-bound) : v > bound ? all<W>(bound) : v);
    }
}

template <class T, int W>
ASYNCMOE_INLINE Two<W> turned(Two<W> own, Two<W> cos, Two<W> other, Two<W> sin) {
    return {rounded<T, W>(own.a * cos.a) + rounded<T, W>(other.a * sin.a),
            rounded<T, W>(own.b * cos.b) + rounded<T, W>(other.b * sin.b)};
}

// Rotates the first `dim` elements of a head in place, by angles [2, dim].
template <class T>
ASYNCMOE_INLINE void rotate(T* x, const T* angles, int dim) {
    constexpr int W = 8, S = 2 * W;
    const int half = dim / 2;
    const T *cos = angles, *sin = angles + dim;
    for (int i = 0; i < half; i += S) {
        const int n = i + S <= half ? S : half - i, j = half + i;
        const Two<W> a = load_two<W>(x + i, n), b = load_two<W>(x + j, n);
        const Two<W> cos_a = load_two<W>(cos + i, n), cos_b = load_two<W>(cos + j, n);
        const Two<W> sin_a = load_two<W>(sin + i, n), sin_b = load_two<W>(sin + j, n);
        store_two<W>(x + i, turned<T, W>(a, cos_a, b, sin_a), n);
        store_two<W>(x + j, turned<T, W>(b, cos_b, a, sin_b), n);
    }
}

template <class T>
void prepare_row(const AttentionCall& call, int64_t row) {
    const AttentionLayer& layer = call.layer;
    const int dim = layer.dim, kv_width = layer.kv_heads * dim;
    T* q = (T*)call.qkv + row * layer.row_width();
    T* k = q + layer.heads * dim;
    if (layer.q_norm != nullptr) {
        rms_norm<T>(q, (const T*)layer.q_norm, q, layer.heads * dim, layer.eps);
        rms_norm<T>(k, (const T*)layer.k_norm, k, kv_width, layer.eps);
    }
    if (layer.clip > 0) clip<T>(q, layer.row_width(), layer.clip);
    const int64_t angle = call.rows.angle == nullptr ? row : call.rows.angle[row];
    const T* angles = (const T*)call.angles + angle * 2 * layer.rotated;
    for (int head = 0; head < layer.heads + layer.kv_heads; ++head) {
        T* x = q + head * dim;
        if (layer.head_norm != nullptr)
            rms_norm<T>(x, (const T*)layer.head_norm + head * dim, x, dim, layer.eps);
        rotate<T>(x, angles, layer.rotated);
    }
    const int64_t at = call.rows.cache_index[row] * kv_width;
    __builtin_memcpy((T*)call.keys + at, k, kv_width * sizeof(T));
    __builtin_memcpy((T*)call.values + at, k + kv_width, kv_width * sizeof(T));
}

template <class T>
void prepare_rows(const AttentionCall& call, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) prepare_row<T>(call, row);
}
