// Small float32 products C = A B on data that lies in the caches, for attention and the router.
//
// An element of C is summed over k from first to last in one accumulator, whatever rows and columns
// are computed beside it, so that a row does not depend on its neighbours.

template <int W, int M, int N>
ASYNCMOE_INLINE void matmul_tile(const float* a, int64_t a_stride, const float* b,
                                   int64_t b_stride, float* c, int64_t c_stride, int depth,
                                   bool add) {
    F<W> sums[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) sums[m][n] = add ? load<W>(c + m * c_stride + n * W) : F<W>{};
    for (int k = 0; k < depth; ++k) {
        F<W> columns[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) columns[n] = load<W>(b + k * b_stride + n * W);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            const F<W> row = all<W>(a[m * a_stride + k]);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sums[m][n] += row * columns[n];
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store<W>(c + m * c_stride + n * W, sums[m][n]);
}

template <int W, int M, int N>
void matmul_rows(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                   int64_t c_stride, int rows, int depth, bool add) {
    int m = 0;
    for (; m + M <= rows; m += M)
        matmul_tile<W, M, N>(a + m * a_stride, a_stride, b, b_stride, c + m * c_stride, c_stride,
                            depth, add);
    for (; m < rows; ++m)
        matmul_tile<W, 1, N>(a + m * a_stride, a_stride, b, b_stride, c + m * c_stride, c_stride,
                            depth, add);
}

// c [rows, columns] = (add ? c : 0) + a [rows, depth] b [depth, columns]; `columns` is a multiple
// of 8.
inline void matmul(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                     int64_t c_stride, int rows, int columns, int depth, bool add) {
    constexpr int W = kWidth;
    int n = 0;
    if (rows < 6)  // few rows need more columns at a time to hide the latency of additions
        for (; n + 4 * W <= columns; n += 4 * W)
            matmul_rows<W, 2, 4>(a, a_stride, b + n, b_stride, c + n, c_stride, rows, depth, add);
    for (; n + 2 * W <= columns; n += 2 * W)
        matmul_rows<W, 6, 2>(a, a_stride, b + n, b_stride, c + n, c_stride, rows, depth, add);
    for (; n < columns; n += 8)
        matmul_rows<8, 6, 1>(a, a_stride, b + n, b_stride, c + n, c_stride, rows, depth, add);
}
