// Random uniforms, dropout, and residual + dropout(x + bias), from the counter-based generator in philox.h.
//
// The draw of an element is a function of its number alone, so nothing is stored for the backward pass: dropout's
// gradient is dropout itself applied to dy. Rows (the last dimension, whose elements are numbered consecutively) are split
// over threads; a row is worked through in pieces of 64 elements = 16 Philox blocks, one per SIMD lane, whose random words
// stay in L1. p = 0 (threshold 0) skips the generator.
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

// The number of a row's first element.
HAL_INLINE uint64_t row_start(const draw_t *draw, int64_t row) {
    int64_t i2 = row % draw->n2, i1 = row / draw->n2 % draw->n1, i0 = row / draw->n2 / draw->n1;
    return (uint64_t)(draw->index0 + i0 * draw->s0 + i1 * draw->s1 + i2 * draw->s2);
}

// Long rows are cut so that one row can still feed every thread; a cut is a whole number of Philox chunks.
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

void hal_dropout(int dtype, uintptr_t x, uintptr_t out, uint32_t threshold, double scale, uint64_t seed, uint64_t offset,
                 int64_t index0, int64_t n0, int64_t n1, int64_t n2, int64_t n3, int64_t s0, int64_t s1, int64_t s2) {
    const draw_t draw = {{seed, offset}, index0, n1, n2, s0, s1, s2};
    HAL_DISPATCH(dtype, dropout, x, 0, 0, out, threshold, scale, &draw, n0 * n1 * n2, n3);
}

void hal_bias_dropout_add(int dtype, uintptr_t x, uintptr_t bias, uintptr_t residual, uintptr_t out, uint32_t threshold,
                          double scale, uint64_t seed, uint64_t offset, int64_t index0, int64_t n0, int64_t n1, int64_t n2,
                          int64_t n3, int64_t s0, int64_t s1, int64_t s2) {
    const draw_t draw = {{seed, offset}, index0, n1, n2, s0, s1, s2};
    HAL_DISPATCH(dtype, dropout, x, bias, residual, out, threshold, scale, &draw, n0 * n1 * n2, n3);
}

#else

static void NAME(dropout)(uintptr_t x_, uintptr_t bias_, uintptr_t residual_, uintptr_t out_, uint32_t threshold,
                          double scale_, const draw_t *draw, int64_t rows, int64_t width) {
    const T *x = (const T *)x_, *bias = (const T *)bias_, *residual = (const T *)residual_;
    T *out = (T *)out_;
    const real scale = (real)scale_;
    int64_t cuts = (width + CUT - 1) / CUT, tasks = rows * cuts;
#pragma omp parallel for schedule(static) if (tasks * (width < CUT ? width : CUT) >= HAL_PARALLEL_MIN)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t row = task / cuts, begin = task % cuts * CUT, end = begin + CUT < width ? begin + CUT : width;
        uint64_t start = row_start(draw, row);
        for (int64_t i = begin; i < end; i += PHILOX_CHUNK) {
            int64_t n = end - i < PHILOX_CHUNK ? end - i : PHILOX_CHUNK, at = row * width + i;
            uint32_t words[PHILOX_CHUNK];
            real value[PHILOX_CHUNK];
            if (threshold) philox_words(draw->rng, start + (uint64_t)i, n, words);
#pragma omp simd
            for (int64_t j = 0; j < n; j++) value[j] = LOAD(x + at + j);
            if (bias) {
#pragma omp simd
                for (int64_t j = 0; j < n; j++) value[j] += LOAD(bias + i + j);
            }
            if (threshold) {
#pragma omp simd
                for (int64_t j = 0; j < n; j++) value[j] = words[j] >> 8 >= threshold ? value[j] * scale : (real)0;
            }
            if (residual) {
#pragma omp simd
                for (int64_t j = 0; j < n; j++) value[j] += LOAD(residual + at + j);
            }
#pragma omp simd
            for (int64_t j = 0; j < n; j++) STORE(out + at + j, value[j]);
        }
    }
}

#endif
