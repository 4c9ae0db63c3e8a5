// Random uniforms, dropout, and residual + dropout(x + bias), from the counter-based generator in philox.h.
//
// An element's random word is a function of its index alone, so nothing is stored for the backward pass: the gradient
// of dropout is dropout applied to dy. Rows (the last dimension, whose elements have consecutive indices) are split
// over threads. A row is processed in pieces of 64 elements = 16 Philox blocks, one per SIMD lane (17 blocks, and so
// two sets of lanes, if a row does not begin at a multiple of 4); the random words stay in L1. p = 0 (threshold 0)
// skips the generator and processes entire rows.
//
// The backward pass of a bias sums the unrounded gradient over rows, in pieces (see piece_count). The residual stream
// may be wider than x (float32 with bfloat16 x): two flags select T or real for input and output.
//
// Memory traffic: uniform writes 4 bytes per element; dropout reads and writes one element each; bias_dropout_add reads
// two and writes one. Philox itself costs about 40 vector instructions per 16 elements.
#ifndef HAL_BODY
#include "common.h"
#include "philox.h"

#include "dropout_api.h"

typedef struct {
    philox_t rng;
    int64_t index0, n1, n2, s0, s1, s2;
} draw_t;

// The index of a row's first element in the draw.
HAL_INLINE uint64_t row_start(const draw_t *draw, int64_t row) {
    int64_t i2 = row % draw->n2, i1 = row / draw->n2 % draw->n1, i0 = row / draw->n2 / draw->n1;
    return (uint64_t)(draw->index0 + i0 * draw->s0 + i1 * draw->s1 + i2 * draw->s2);
}

// Long rows are cut so that a single row can occupy every thread; cuts are at multiples of a Philox chunk.
enum { CUT = 16 * PHILOX_CHUNK };

#define HAL_SELF "dropout.c"
#include "dtypes.h"

void hal_philox_uniform(uintptr_t out_, uint64_t seed, uint64_t offset, int64_t index0, int64_t n0, int64_t n1, int64_t n2,
                        int64_t n3, int64_t s0, int64_t s1, int64_t s2) {
    const draw_t draw = {{seed, offset}, index0, n1, n2, s0, s1, s2};
    float *out = (float *)out_;
    int64_t cuts = (n3 + CUT - 1) / CUT, tasks = n0 * n1 * n2 * cuts;
#pragma omp parallel for schedule(static) if (tasks * (n3 < CUT ? n3 : CUT) >= HAL_PARALLEL_MIN)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t row = task / cuts, begin = task % cuts * CUT, end = begin + CUT < n3 ? begin + CUT : n3;
        float *to = out + row * n3;
        for (int64_t i = begin; i < end; i += PHILOX_CHUNK) {
            uint32_t words[PHILOX_CHUNK];
            int64_t n = end - i < PHILOX_CHUNK ? end - i : PHILOX_CHUNK;
            philox_words(draw.rng, row_start(&draw, row) + (uint64_t)i, n, words);
#pragma omp simd
            for (int64_t j = 0; j < n; j++) to[i + j] = (float)(int32_t)(words[j] >> 8) * 0x1p-24f;
        }
    }
}

void hal_dropout(int dtype, uintptr_t x, int x_wide, uintptr_t bias, uintptr_t residual, uintptr_t out, int out_wide,
                 uint32_t threshold, double scale, uint64_t seed, uint64_t offset, int64_t index0, int64_t n0, int64_t n1,
                 int64_t n2, int64_t n3, int64_t s0, int64_t s1, int64_t s2) {
    const draw_t draw = {{seed, offset}, index0, n1, n2, s0, s1, s2};
    HAL_DISPATCH(dtype, dropout, x, x_wide, bias, residual, out, out_wide, threshold, scale, &draw, n0 * n1 * n2, n3);
}

void hal_dropout_bwd(int dtype, uintptr_t dy, int dy_wide, uintptr_t dx, uintptr_t dbias, uint32_t threshold, double scale,
                     uint64_t seed, uint64_t offset, int64_t index0, int64_t n0, int64_t n1, int64_t n2, int64_t n3,
                     int64_t s0, int64_t s1, int64_t s2) {
    const draw_t draw = {{seed, offset}, index0, n1, n2, s0, s1, s2};
    HAL_DISPATCH(dtype, dropout_bwd, dy, dy_wide, dx, dbias, threshold, scale, &draw, n0 * n1 * n2, n3);
}

#else

// value[j] += p[j], where p is T or real.
HAL_INLINE void NAME(add_chunk)(real *value, uintptr_t p, int wide, int64_t at, int64_t n) {
    if (wide) {
#pragma omp simd
        for (int64_t j = 0; j < n; j++) value[j] += ((const real *)p)[at + j];
    } else {
#pragma omp simd
        for (int64_t j = 0; j < n; j++) value[j] += LOAD((const T *)p + at + j);
    }
}

HAL_INLINE void NAME(drop_chunk)(real *value, philox_t rng, uint64_t first, uint32_t threshold, real scale, int64_t n) {
    if (!threshold) return;
    uint32_t words[PHILOX_CHUNK];
    philox_words(rng, first, n, words);
#pragma omp simd
    for (int64_t j = 0; j < n; j++) value[j] = words[j] >> 8 >= threshold ? value[j] * scale : (real)0;
}

HAL_INLINE void NAME(store_chunk)(const real *value, uintptr_t p, int wide, int64_t at, int64_t n) {
    enum { LINE = 64 / sizeof(T) };
    if (wide) {
        memcpy((real *)p + at, value, (size_t)n * sizeof(real));
        return;
    }
    int64_t j = 0;
    for (; j + LINE <= n; j += LINE) NAME(store_line)(0, (T *)p + at + j, value + j);
    for (; j < n; j++) STORE((T *)p + at + j, value[j]);
}

HAL_INLINE void NAME(dropout_chunk)(uintptr_t x, int x_wide, uintptr_t bias, uintptr_t residual, uintptr_t out,
                                    int out_wide, uint32_t threshold, real scale, philox_t rng, uint64_t first, int64_t at,
                                    int64_t i, int64_t n) {
    real value[PHILOX_CHUNK] = {0};
    NAME(add_chunk)(value, x, x_wide, at, n);
    if (bias) NAME(add_chunk)(value, bias, 1, i, n);
    NAME(drop_chunk)(value, rng, first, threshold, scale, n);
    if (residual) NAME(add_chunk)(value, residual, out_wide, at, n);
    NAME(store_chunk)(value, out, out_wide, at, n);
}

// Without dropout and in one dtype, the sums need no intermediate array.
HAL_INLINE void NAME(add_row)(const T *x, const real *bias, const T *residual, T *out, int64_t n) {
    STORE_ROW(0, out, n, i, LOAD(x + i) + bias[i] + LOAD(residual + i));
}

static void NAME(dropout)(uintptr_t x, int x_wide, uintptr_t bias, uintptr_t residual, uintptr_t out, int out_wide,
                          uint32_t threshold, double scale, const draw_t *draw, int64_t rows, int64_t width) {
    const int64_t cuts = (width + CUT - 1) / CUT, tasks = rows * cuts;
    const int plain = !threshold && bias && residual && !x_wide && !out_wide;
#pragma omp parallel for schedule(static) if (tasks * (width < CUT ? width : CUT) >= HAL_PARALLEL_MIN)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t row = task / cuts, begin = task % cuts * CUT, end = begin + CUT < width ? begin + CUT : width;
        if (plain) {
            const int64_t at = row * width + begin;
            NAME(add_row)((const T *)x + at, (const real *)bias + begin, (const T *)residual + at, (T *)out + at,
                          end - begin);
            continue;
        }
        const uint64_t start = row_start(draw, row);
        int64_t i = begin;
        for (; i + PHILOX_CHUNK <= end; i += PHILOX_CHUNK)  // a compile-time constant
            NAME(dropout_chunk)(x, x_wide, bias, residual, out, out_wide, threshold, (real)scale, draw->rng,
                                start + (uint64_t)i, row * width + i, i, PHILOX_CHUNK);
        if (i < end)
            NAME(dropout_chunk)(x, x_wide, bias, residual, out, out_wide, threshold, (real)scale, draw->rng,
                                start + (uint64_t)i, row * width + i, i, end - i);
    }
}

HAL_INLINE void NAME(dropout_bwd_chunk)(uintptr_t dy, int dy_wide, uintptr_t dx, double *db, uint32_t threshold, real scale,
                                        philox_t rng, uint64_t first, int64_t at, int64_t n) {
    real value[PHILOX_CHUNK] = {0};
    NAME(add_chunk)(value, dy, dy_wide, at, n);
    NAME(drop_chunk)(value, rng, first, threshold, scale, n);
#pragma omp simd
    for (int64_t j = 0; j < n; j++) db[j] += value[j];
    if (dx) NAME(store_chunk)(value, dx, 0, at, n);
}

static void NAME(dropout_bwd)(uintptr_t dy, int dy_wide, uintptr_t dx, uintptr_t dbias, uint32_t threshold, double scale,
                              const draw_t *draw, int64_t rows, int64_t width) {
    const int64_t pieces = piece_count(rows);
    double *partial = hal_scratch((size_t)(pieces * width) * sizeof(double));
#pragma omp parallel if (rows * width >= HAL_PARALLEL_MIN)
    {
#pragma omp for schedule(static)
        for (int64_t piece = 0; piece < pieces; piece++) {
            double *db = partial + piece * width;
            memset(db, 0, (size_t)width * sizeof(double));
            for (int64_t row = rows * piece / pieces; row < rows * (piece + 1) / pieces; row++) {
                const uint64_t start = row_start(draw, row);
                int64_t i = 0;
                for (; i + PHILOX_CHUNK <= width; i += PHILOX_CHUNK)
                    NAME(dropout_bwd_chunk)(dy, dy_wide, dx, db + i, threshold, (real)scale, draw->rng,
                                            start + (uint64_t)i, row * width + i, PHILOX_CHUNK);
                if (i < width)
                    NAME(dropout_bwd_chunk)(dy, dy_wide, dx, db + i, threshold, (real)scale, draw->rng,
                                            start + (uint64_t)i, row * width + i, width - i);
            }
        }
        RNAME(sum_pieces)(partial, pieces, width, width, (real *)dbias);
    }
}

#endif
