// Vectors of `kWidth` or fewer floats, for one instruction set; see `each_isa.h`.
//
// Elements are float or Bf16 in memory and float in registers. `rounded` is what a value becomes by
// being stored and read again: kernels use it wherever torch would have stored a tensor.

template <int W>
struct Lanes {
    typedef float F __attribute__((vector_size(W * 4)));
    typedef int32_t I __attribute__((vector_size(W * 4)));
    typedef uint32_t U __attribute__((vector_size(W * 4)));
    typedef uint16_t H __attribute__((vector_size(W * 2)));
};

template <int W>
using F = typename Lanes<W>::F;

template <int W>
ASYNCMOE_INLINE F<W> load(const float* p) {
    F<W> v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

template <int W>
ASYNCMOE_INLINE F<W> widened(typename Lanes<W>::H half) {
    typedef typename Lanes<W>::U U;
#if ASYNCMOE_LEVEL >= 2
    if constexpr (W == 16) return (F<W>)((U)_mm512_cvtepu16_epi32((__m256i)half) << 16);
#endif
#if ASYNCMOE_LEVEL >= 1
    if constexpr (W == 8) return (F<W>)((U)_mm256_cvtepu16_epi32((__m128i)half) << 16);
#endif
    return (F<W>)(__builtin_convertvector(half, U) << 16);
}

template <int W>
ASYNCMOE_INLINE F<W> load(const Bf16* p) {
    typename Lanes<W>::H half;
    __builtin_memcpy(&half, p, sizeof half);
    return widened<W>(half);
}

// The bits of v rounded to Bf16 as torch does, to nearest even, in the high half of each lane; what
// is in the low half has no meaning. A NaN stays one if its low half is empty: so are those that
// come from Bf16 or from arithmetic.
template <int W>
ASYNCMOE_INLINE typename Lanes<W>::U rounded_bits(F<W> v) {
    typedef typename Lanes<W>::U U;
    const U bits = (U)v;
    return bits + (0x7fff + ((bits >> 16) & 1));
}

template <int W>
ASYNCMOE_INLINE void store(float* p, F<W> v) {
    __builtin_memcpy(p, &v, sizeof v);
}

template <int W>
ASYNCMOE_INLINE void store(Bf16* p, F<W> v) {
    typedef typename Lanes<W>::H H;
    const H half = __builtin_convertvector(rounded_bits<W>(v) >> 16, H);
    __builtin_memcpy(p, &half, sizeof half);
}

template <class T, int W>
ASYNCMOE_INLINE F<W> rounded(F<W> v) {
    if constexpr (sizeof(T) == 4) return v;
    else return (F<W>)(rounded_bits<W>(v) & 0xffff0000u);
}

// The first `count` < W elements, and zeros.
template <int W, class T>
ASYNCMOE_INLINE F<W> load_some(const T* p, int count) {
    T padded[W] = {};
    __builtin_memcpy(padded, p, count * sizeof(T));
    return load<W>(padded);
}

template <int W, class T>
ASYNCMOE_INLINE void store_some(T* p, F<W> v, int count) {
    T padded[W];
    store<W>(padded, v);
    __builtin_memcpy(p, padded, count * sizeof(T));
}

// 2 * W neighbours in the order that costs least: of floats the first half and the second, of Bf16
// the even ones and the odd ones.
template <int W>
struct Two {
    F<W> a, b;
};

template <int W>
ASYNCMOE_INLINE Two<W> load_two(const float* p) {
    return {load<W>(p), load<W>(p + W)};
}

template <int W>
ASYNCMOE_INLINE Two<W> load_two(const Bf16* p) {
    typename Lanes<W>::U both;
    __builtin_memcpy(&both, p, sizeof both);
    return {(F<W>)(both << 16), (F<W>)(both & 0xffff0000u)};
}

template <int W>
ASYNCMOE_INLINE void store_two(float* p, Two<W> v) {
    store<W>(p, v.a);
    store<W>(p + W, v.b);
}

template <int W>
ASYNCMOE_INLINE void store_two(Bf16* p, Two<W> v) {
    const typename Lanes<W>::U both =
        (rounded_bits<W>(v.a) >> 16) | (rounded_bits<W>(v.b) & 0xffff0000u);
    __builtin_memcpy(p, &both, sizeof both);
}

// The first `count` <= 2 * W neighbours, and zeros.
template <int W, class T>
ASYNCMOE_INLINE Two<W> load_two(const T* p, int count) {
    if (count == 2 * W) return load_two<W>(p);
    T padded[2 * W] = {};
    __builtin_memcpy(padded, p, count * sizeof(T));
    return load_two<W>(padded);
}

template <int W, class T>
ASYNCMOE_INLINE void store_two(T* p, Two<W> v, int count) {
    if (count == 2 * W) return store_two<W>(p, v);
    T padded[2 * W];
    store_two<W>(padded, v);
    __builtin_memcpy(p, padded, count * sizeof(T));
}

template <int W>
ASYNCMOE_INLINE F<W> all(float x) {
    return x - F<W>{};  // x + 0 would be a sum: it turns -0 into 0
}

// a where it is larger or NaN, else b.
template <int W>
ASYNCMOE_INLINE F<W> larger(F<W> a, F<W> b) {
    return a <= b ? b : a;
}

template <int W>
ASYNCMOE_INLINE float sum_of(F<W> v) {
    float lanes[W];
    store<W>(lanes, v);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

template <int W>
ASYNCMOE_INLINE float largest_of(F<W> v) {
    float most = v[0];
    for (int i = 1; i < W; ++i) most = most >= v[i] ? most : v[i];
    return most;
}

// 2^x for x <= 0, to 2 units in the last place; 0 below the normal numbers. NaN stays NaN.
template <int W>
ASYNCMOE_INLINE F<W> exp2_of(F<W> x) {
    typedef typename Lanes<W>::I I;
    x = x < -127.0f ? all<W>(-127.0f) : x;
    const float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const F<W> shifted = x + kRound;
    const F<W> whole = shifted - kRound, part = x - whole;
    F<W> y = part * 1.5453163e-4f + 1.3390863e-3f;
    y = y * part + 9.6180826e-3f;
    y = y * part + 5.5503571e-2f;
    y = y * part + 2.4022651e-1f;
    y = y * part + 6.9314719e-1f;
    y = y * part + 1.0f;
    // The scale is a factor, not added to the exponent, so that a NaN survives.
    const I exponent = ((I)shifted - 0x4b400000 + 127) << 23;
    return y * (F<W>)exponent;
}

#if defined(__clang__)
#define ASYNCMOE_SHUFFLE8(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ASYNCMOE_SHUFFLE8(a, b, ...) __builtin_shuffle(a, b, (Lanes<8>::I){__VA_ARGS__})
#endif

// A vector of 8 with the same sum: a vector of 16 is folded, one of 4 gets zeros.
template <int W>
ASYNCMOE_INLINE F<8> folded(F<W> v) {
    F<8> halves[2] = {};
    __builtin_memcpy(halves, &v, sizeof v);
    return W == 16 ? halves[0] + halves[1] : halves[0];
}

// Lane i of the result is the sum over the lanes of v[i].
template <int W>
ASYNCMOE_INLINE F<8> sums_of_eight(const F<W>* v) {
    F<8> four[4], two[2];
    for (int i = 0; i < 4; ++i) {
        const F<8> a = folded<W>(v[2 * i]), b = folded<W>(v[2 * i + 1]);
        four[i] = ASYNCMOE_SHUFFLE8(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
                  ASYNCMOE_SHUFFLE8(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    }
    // Lanes of four[i]: sums of v[2i], v[2i+1] over lanes 0-1, then 2-3, 4-5 and 6-7.
    for (int i = 0; i < 2; ++i)
        two[i] = ASYNCMOE_SHUFFLE8(four[2 * i], four[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                 ASYNCMOE_SHUFFLE8(four[2 * i], four[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return ASYNCMOE_SHUFFLE8(two[0], two[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           ASYNCMOE_SHUFFLE8(two[0], two[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

// Rows i and columns j change places.
ASYNCMOE_INLINE void transpose_eight(F<8>* v) {
    F<8> a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = ASYNCMOE_SHUFFLE8(v[i], v[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        a[i + 1] = ASYNCMOE_SHUFFLE8(v[i], v[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; ++j) {
            b[i + j] = ASYNCMOE_SHUFFLE8(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            b[i + j + 2] = ASYNCMOE_SHUFFLE8(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int j = 0; j < 4; ++j) {
        v[j] = ASYNCMOE_SHUFFLE8(b[j], b[j + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        v[j + 4] = ASYNCMOE_SHUFFLE8(b[j], b[j + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
