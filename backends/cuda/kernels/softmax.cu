// Scale, mask and softmax over the last dimension, fused, forward and backward; a block per row.
//
// Forward: one pass keeps a running maximum and sum of exponentials per thread (Milakov, Gimelshein, arXiv 1805.02867),
// merged over the block; a second pass over the row, still in L1, writes y = exp(scale x - max) / sum. Causal rows
// process their visible columns only and zero the rest. A fully masked row is all zeros; NaN or +inf in a visible
// column makes the visible part NaN. Backward: dx = scale p (dy - sum(p dy)), with p recomputed, unrounded, from x, the
// mask and the row's statistics, because in 16 bits the rounding of y would dominate that difference. The product scale
// x is rounded separately everywhere: contracted with the subtraction into an FMA, it would differ from the rounded
// products whose maximum was taken.
//
// Memory traffic: forward reads x (and a byte of mask per element), writes y; backward reads x, dy (and mask), writes
// dx.
#include "common.h"

// One byte per element, 1 = masked out, read through strides in bytes; at = 0: no mask.
struct Mask {
    const u8 *at;
    i64 b, n, q, k;
};

// The visible part of a row: `columns` of it, further restricted by `mask` if MASKED.
template <bool MASKED> struct Row {
    int columns;
    const u8 *mask;
    i64 stride;
    INLINE bool masked(int j) const { return MASKED && mask[j * stride] != 0; }
};

template <bool MASKED> INLINE Row<MASKED> row_of(i64 row, i64 heads, i64 sq, i64 sk, i64 causal, const Mask &mask) {
    const i64 query = row % sq, outer = row / sq;
    i64 visible = causal ? query + sk - sq + 1 : sk;
    visible = visible < 0 ? 0 : visible < sk ? visible : sk;
    const u8 *at = mask.at;
    if (MASKED) at += outer / heads * mask.b + outer % heads * mask.n + query * mask.q;
    return {(int)visible, at, mask.k};
}

// exp(scale x - top) inverse, with the product rounded as where the maximum was taken.
INLINE float probability(float x, float scale, float top, float inverse) {
    return power_of_2((__fmul_rn(x, scale) - top) * LOG2_E) * inverse;
}

// stats: [2][rows], the row's maximum of scale x and 1 / sum; both are 0 if no column is visible.
template <class T, bool MASKED>
INLINE void forward(const T *x_, T *y_, float *stats, double scale_, i64 causal, i64 rows, i64 heads, i64 sq, i64 sk,
                    const Mask &mask, i64 vec) {
    constexpr int V = Lanes<T>::count;
    const float scale = (float)scale_;
    for (i64 r = blockIdx.x; r < rows; r += gridDim.x) {
        const T *x = x_ + r * sk;
        T *y = y_ + r * sk;
        const auto row = row_of<MASKED>(r, heads, sq, sk, causal, mask);
        const int head = vec ? head_of(x, row.columns) : row.columns;
        Floats<2> mine = {{-INFINITE, 0.0f}};
        float alive = 0.0f;
        const auto fetch_x = [&](int j, auto w) { return fetch<decltype(w)::count>(x + j); };
        walk<V, 4>(head, row.columns, fetch_x, [&](int j, const auto &held, auto w) {
            constexpr int W = decltype(w)::count;
            float s[W];
            floats(held, s);
#pragma unroll
            for (int i = 0; i < W; i++) {
                const bool masked = row.masked(j + i);
                s[i] = masked ? -INFINITE : __fmul_rn(s[i], scale);
                if (!masked) alive = 1.0f;
            }
            log_sum_add(mine, s);
        });
        const Floats<3> all = block_reduce(Floats<3>{{mine.v[0], mine.v[1], alive}}, LogSumAndSum());
        // A row whose visible scores are all -inf is 0/0, as in the reference; a row without a visible column is 0.
        const bool dead = all.v[2] == 0.0f;
        const float top = dead ? 0.0f : all.v[0], inverse = dead ? 0.0f : 1.0f / all.v[1];
        if (threadIdx.x == 0) {
            stats[r] = top;
            stats[rows + r] = inverse;
        }
        walk<V, 4>(head, row.columns, fetch_x, [&](int j, const auto &held, auto w) {
            constexpr int W = decltype(w)::count;
            float s[W];
            floats(held, s);
#pragma unroll
            for (int i = 0; i < W; i++) s[i] = row.masked(j + i) ? 0.0f : probability(s[i], scale, top, inverse);
            store(y + j, s);
        });
        for (int j = row.columns + threadIdx.x; j < sk; j += blockDim.x) from_float(0.0f, y[j]);
    }
}

template <class T, bool MASKED>
INLINE void backward(const T *x_, const T *dy_, T *dx_, const float *stats, double scale_, i64 causal, i64 rows, i64 heads,
                     i64 sq, i64 sk, const Mask &mask, i64 vec) {
    constexpr int V = Lanes<T>::count;
    const float scale = (float)scale_;
    for (i64 r = blockIdx.x; r < rows; r += gridDim.x) {
        const T *x = x_ + r * sk, *dy = dy_ + r * sk;
        T *dx = dx_ + r * sk;
        const auto row = row_of<MASKED>(r, heads, sq, sk, causal, mask);
        const int head = vec ? head_of(x, row.columns) : row.columns;
        const float top = stats[r], inverse = stats[rows + r];
        Floats<1> dot = {};
        const auto fetch_both = [&](int j, auto w) {
            constexpr int W = decltype(w)::count;
            return Pair<Raw<T, W>, Raw<T, W>>{fetch<W>(x + j), fetch<W>(dy + j)};
        };
        walk<V, 2>(head, row.columns, fetch_both, [&](int j, const auto &held, auto w) {
            constexpr int W = decltype(w)::count;
            float s[W], d[W];
            floats(held.a, s);
            floats(held.b, d);
#pragma unroll
            for (int i = 0; i < W; i++)
                if (!row.masked(j + i)) dot.v[0] += probability(s[i], scale, top, inverse) * d[i];
        });
        dot = block_reduce(dot, Add<1>());
        walk<V, 2>(head, row.columns, fetch_both, [&](int j, const auto &held, auto w) {
            constexpr int W = decltype(w)::count;
            float s[W], d[W];
            floats(held.a, s);
            floats(held.b, d);
#pragma unroll
            for (int i = 0; i < W; i++) {
                const float p = probability(s[i], scale, top, inverse);
                s[i] = row.masked(j + i) ? 0.0f : scale * p * (d[i] - dot.v[0]);
            }
            store(dx + j, s);
        });
        for (int j = row.columns + threadIdx.x; j < sk; j += blockDim.x) from_float(0.0f, dx[j]);
    }
}

template <class T>
__global__ void __launch_bounds__(256, 4)
    softmax_fwd(const T *x, T *y, float *stats, double scale, i64 causal, i64 rows, i64 heads, i64 sq, i64 sk, Mask mask,
                i64 vec) {
    if (mask.at) forward<T, true>(x, y, stats, scale, causal, rows, heads, sq, sk, mask, vec);
    else forward<T, false>(x, y, stats, scale, causal, rows, heads, sq, sk, mask, vec);
}

template <class T>
__global__ void __launch_bounds__(256) softmax_bwd(const T *x, const T *dy, T *dx, const float *stats, double scale,
                                                   i64 causal, i64 rows, i64 heads, i64 sq, i64 sk, Mask mask, i64 vec) {
    if (mask.at) backward<T, true>(x, dy, dx, stats, scale, causal, rows, heads, sq, sk, mask, vec);
    else backward<T, false>(x, dy, dx, stats, scale, causal, rows, heads, sq, sk, mask, vec);
}

EXPORT(softmax_fwd<f32>)
EXPORT(softmax_fwd<bf16>)
EXPORT(softmax_fwd<f16>)
EXPORT(softmax_bwd<f32>)
EXPORT(softmax_bwd<bf16>)
EXPORT(softmax_bwd<f16>)
