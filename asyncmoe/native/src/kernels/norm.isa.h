// Root-mean-square norm of one vector, rounded where torch's `weight * rms_norm(x)` is.

// out = weight * (x / rms(x)); `out` may be `x`.
template <class T>
ASYNCMOE_INLINE void rms_norm(const T* x, const T* weight, T* out, int width, float eps) {
    constexpr int W = kWidth, S = 2 * W;
    Two<W> sum = {}, other = {};  // two of each, since a multiply-add waits for the one before
    int i = 0;
    for (; i + 2 * S <= width; i += 2 * S) {
        const Two<W> v = load_two<W>(x + i), w = load_two<W>(x + i + S);
        sum.a += v.a * v.a, sum.b += v.b * v.b;
        other.a += w.a * w.a, other.b += w.b * w.b;
    }
    for (; i < width; i += S) {
        const Two<W> v = load_two<W>(x + i, i + S <= width ? S : width - i);
        sum.a += v.a * v.a, sum.b += v.b * v.b;
    }
    const float square = sum_of<W>((sum.a + sum.b) + (other.a + other.b)) / (float)width;
    const float scale = 1.0f / __builtin_sqrtf(square + eps);
    for (i = 0; i < width; i += S) {
        const int count = i + S <= width ? S : width - i;
        const Two<W> v = load_two<W>(x + i, count), w = load_two<W>(weight + i, count);
        const F<W> a = rounded<T, W>(v.a * scale) * w.a, b = rounded<T, W>(v.b * scale) * w.b;
        store_two<W>(out + i, Two<W>{a, b}, count);
    }
}

// sum = x + y; `sum` may be either.
template <class T>
ASYNCMOE_INLINE void add(const T* x, const T* y, T* sum, int width) {
    constexpr int W = kWidth, S = 2 * W;
    for (int i = 0; i < width; i += S) {
        const int count = i + S <= width ? S : width - i;
        const Two<W> v = load_two<W>(x + i, count), w = load_two<W>(y + i, count);
        store_two<W>(sum + i, Two<W>{v.a + w.a, v.b + w.b}, count);
    }
}
