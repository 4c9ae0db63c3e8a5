// Scale, mask and softmax over the last dimension, fused; rows are split over threads.
//
// Forward, per row: (1) the maximum of v = scale x, -inf where masked; with a mask, v is kept in a scratch row that stays
// in L1/L2; (2) e = exp(scale x - max) and its sum; the difference is one FMA, so that large probabilities do not carry
// the rounding error of scale x (where scores exceed 2^30, see COARSE, the difference is taken from v instead); (3) y =
// e / sum.
// Causal rows process their visible columns only and zero the rest.
// A fully masked row is all zeros; a visible NaN or +inf makes its row NaN.
// Backward: dx = scale y (dy - sum(dy y)); y = 0 gives dx = 0, so masks are not read again. With 16-bit data the
// rounding of y would dominate that difference, so y is recomputed, unrounded, from x and the row's log-sum-exp, unless
// the latter is so large that its own rounding is coarser than that of y.
//
// Memory traffic: forward reads x (and one byte of mask per element) and writes y once; backward reads y (16-bit: also
// x) and dy and writes dx once. Large results are written with non-temporal stores. With causal, only the visible half
// is read.
#ifndef HAL_BODY
#include "common.h"

#include "softmax_api.h"

HAL_INLINE int64_t visible_columns(int causal, int64_t query, int64_t sq, int64_t sk) {
    if (!causal) return sk;
    int64_t visible = query + sk - sq + 1;
    return visible < 0 ? 0 : (visible < sk ? visible : sk);
}

// The number of columns of a causal row to write as if they were visible: rounded up to a multiple of LANES, in the
// row, where a tail would otherwise be written element by element, or where whole lines are written.
HAL_INLINE int64_t written_columns(int masks, int stream, int64_t visible, int64_t sk) {
    if (masks && stream != STREAM_LINES) return visible;
    return whole_lanes(visible) < sk ? whole_lanes(visible) : sk;
}

// Zeroes the masked columns of a row whose first part STORE_ROW wrote.
HAL_INLINE void zero_out(int stream, void *to_, int64_t bytes) {
    static const _Alignas(64) char zeros[64];
    char *to = (char *)to_;
    if (bytes <= 0) return;
    int64_t at = stream ? (int64_t)(-(uintptr_t)to % 64) : 0;
    if (at > bytes) at = bytes;
    memset(to, 0, (size_t)at);
    for (; stream && at + 64 <= bytes; at += 64) STREAM_LINE(to + at, zeros);
    memset(to + at, 0, (size_t)(bytes - at));
}

// Causal rows differ in length, so they are distributed cyclically to balance the work. A turn is 64 KiB of rows, so
// that the hardware prefetcher seldom reads ahead into another thread's rows, but at most an eighth of all rows.
HAL_INLINE int64_t rows_in_turn(int64_t rows, int64_t row_bytes) {
    const int64_t some = row_bytes > 0 ? 65536 / row_bytes : 1, most = rows / 8;
    return some < most ? (some > 0 ? some : 1) : (most > 0 ? most : 1);
}

typedef struct {
    const uint8_t *data;
    int64_t b, n, q, k;  // strides in bytes
} mask_t;

// Above this magnitude the spacing of floats is 128 or more, so that the rounding error of a product may exceed what
// exp tolerates.
#define COARSE_f32 0x1p30f
#define COARSE_f64 0x1p59
#define LARGEST_LSE 8192  // a float below it is within 2^-12 of the exact value, which is the precision of a float16 y

#define HAL_SELF "softmax.c"
#ifndef HAL_OTHERS
#define HAL_F32_ONLY
#endif
#include "dtypes.h"

void hal_softmax_fwd(int dtype, uintptr_t x, uintptr_t y, double scale, int causal, int64_t b, int64_t n, int64_t sq,
                     int64_t sk, uintptr_t lse, uintptr_t mask_, int64_t mb, int64_t mn, int64_t mq, int64_t mk) {
    const mask_t mask = {(const uint8_t *)mask_, mb, mn, mq, mk};
    HAL_DISPATCH(dtype, softmax_fwd, x, y, scale, causal, b, n, sq, sk, lse, &mask);
}

void hal_softmax_bwd(int dtype, uintptr_t y, uintptr_t x, uintptr_t lse, uintptr_t dy, uintptr_t dx, double scale,
                     int causal, int64_t rows, int64_t sq, int64_t sk) {
    HAL_DISPATCH(dtype, softmax_bwd, y, x, lse, dy, dx, scale, causal, rows, sq, sk);
}

#else

// v = scale x with masked columns at -inf; returns whether any column is visible.
HAL_INLINE int NAME(masked_row)(const T *x, real scale, const uint8_t *mask, int64_t stride, int64_t columns, real *v) {
    if (stride == 0) return 0;
    int alive = 0;
    if (stride == 1) {
#pragma omp simd reduction(| : alive)
        for (int64_t j = 0; j < columns; j++) {
            alive |= !mask[j];
            v[j] = mask[j] ? -(real)INFINITY : LOAD(x + j) * scale;
        }
    } else {
        for (int64_t j = 0; j < columns; j++) {
            alive |= !mask[j * stride];
            v[j] = mask[j * stride] ? -(real)INFINITY : LOAD(x + j) * scale;
        }
    }
    for (int64_t j = columns; j < whole_lanes(columns); j++) v[j] = -(real)INFINITY;
    return alive;
}

static void NAME(softmax_fwd)(uintptr_t x_, uintptr_t y_, double scale_, int causal, int64_t b, int64_t n, int64_t sq,
                              int64_t sk, uintptr_t lse_, const mask_t *mask) {
    const T *x = (const T *)x_;
    real *lse = (real *)lse_;
    T *y = (T *)y_;
    const real scale = (real)scale_;
    const int64_t rows = b * n * sq, row_bytes = sk * (int64_t)sizeof(T);
    const int stream = streams(y_, rows * row_bytes, row_bytes);
    const int64_t turn = rows_in_turn(rows, row_bytes);
#pragma omp parallel if (rows * sk >= HAL_PARALLEL_MIN)
    {
        real *v = hal_scratch((size_t)whole_lanes(sk) * sizeof(real));
#pragma omp for schedule(dynamic, turn)
        for (int64_t row = 0; row < rows; row++) {
            const int64_t query = row % sq, columns = visible_columns(causal, query, sq, sk);
            const uint8_t *mask_row = mask->data;
            if (mask_row) mask_row += row / sq / n * mask->b + row / sq % n * mask->n + query * mask->q;
            const T *in = x + row * sk;
            T *out = y + row * sk;
            const int beyond = BEYOND(row * sk, columns, rows * sk);
            const int plain = !mask_row || (mask->k == 0 && columns > 0 && !*mask_row);
            const int alive = plain ? columns > 0 : NAME(masked_row)(in, scale, mask_row, mask->k, columns, v);
            if (!alive) {
                memset(out, 0, (size_t)sk * sizeof(T));
                if (lse) lse[row] = 0;  // not used, because y is 0
                continue;
            }
            const int64_t whole = whole_lanes(columns), padded = written_columns(NAME(HAL_MASKS), stream, columns, sk);
            real top = -(real)INFINITY;
            if (plain) ROW_MAX_BEYOND(beyond, top, columns, j, LOAD(in + j) * scale);
            else ROW_MAX(top, whole, j, v[j]);
            if (!(top < RNAME(COARSE) && top > -RNAME(COARSE))) {
                if (plain) FILL_LANES(beyond, v, columns, j, LOAD(in + j) * scale, -(real)INFINITY);
                FILL_LANES(beyond, v, columns, j, RNAME(low_exp)(v[j] - top), 0);
            } else if (plain) {
                FILL_LANES(beyond, v, columns, j, RNAME(low_exp)(LOAD(in + j) * scale - top), 0);
            } else {
                FILL_LANES(beyond, v, columns, j,
                           v[j] == -(real)INFINITY ? 0 : RNAME(low_exp)(LOAD(in + j) * scale - top), 0);
            }
            real sum;
            // The next row is prefetched line by line: all of it at once would wait for the few buffers of pending lines.
            ROW_SUM_BEYOND(0, real, sum, whole, j, v[j], PREFETCH((uintptr_t)(in + sk + j), LANES * sizeof(T), 3));
            if (lse) lse[row] = top + RNAME(log)(sum);
            const real inverse = 1 / sum;
            STORE_ROW_BEYOND(NAME(HAL_MASKS), stream, out, padded, j, v[j] * inverse);
            zero_out(stream, out + padded, (sk - padded) * (int64_t)sizeof(T));
        }
        if (stream) stream_end();
    }
}

static void NAME(softmax_bwd)(uintptr_t y_, uintptr_t x_, uintptr_t lse_, uintptr_t dy_, uintptr_t dx_, double scale_,
                              int causal, int64_t rows, int64_t sq, int64_t sk) {
    const real scale = (real)scale_, *lses = (const real *)lse_;
    const int64_t row_bytes = sk * (int64_t)sizeof(T);
    const int stream = streams(dx_, rows * row_bytes, row_bytes);
    const int64_t turn = rows_in_turn(rows, row_bytes);
#pragma omp parallel if (rows * sk >= HAL_PARALLEL_MIN)
    {
        real *p = x_ ? hal_scratch((size_t)sk * sizeof(real)) : 0;
#pragma omp for schedule(dynamic, turn)
        for (int64_t row = 0; row < rows; row++) {
            const int64_t visible = visible_columns(causal, row % sq, sq, sk);
            const int64_t columns = written_columns(NAME(HAL_MASKS), stream, visible, sk);
            const T *y = (const T *)y_ + row * sk, *dy = (const T *)dy_ + row * sk;
            T *dx = (T *)dx_ + row * sk;
            const int beyond = BEYOND(row * sk, columns, rows * sk);
            real dot;
            if (p) {
                const T *x = (const T *)x_ + row * sk;
                const real lse = lses[row];
                if (lse < LARGEST_LSE && lse > -LARGEST_LSE) {
#pragma omp simd
                    for (int64_t j = 0; j < columns; j++)
                        p[j] = LOAD(y + j) == 0 ? 0 : RNAME(low_exp)(LOAD(x + j) * scale - lse);
                } else {
#pragma omp simd
                    for (int64_t j = 0; j < columns; j++) p[j] = LOAD(y + j);
                }
                ROW_SUM(real, dot, columns, j, p[j] * LOAD(dy + j));
                STORE_ROW(stream, dx, columns, j, scale * p[j] * (LOAD(dy + j) - dot));
            } else {
                ROW_SUM_BEYOND(beyond, real, dot, columns, j, LOAD(y + j) * LOAD(dy + j),
                               PREFETCH((uintptr_t)(y + sk + j), LANES * sizeof(T), 3);
                               PREFETCH((uintptr_t)(dy + sk + j), LANES * sizeof(T), 3));
                STORE_ROW_BEYOND(beyond, stream, dx, columns, j, scale * LOAD(y + j) * (LOAD(dy + j) - dot));
            }
            zero_out(stream, dx + columns, (sk - columns) * (int64_t)sizeof(T));
        }
        if (stream) stream_end();
    }
}

#endif
