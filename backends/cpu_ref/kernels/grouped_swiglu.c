// SwiGLU weighted by a probability per row: y = silu(a) b p. The backward pass recomputes silu(a); it goes through a row
// twice, for the gradient of p and for dx, the second time from cache.
//
// Memory traffic: x and y once; backward x, dy and dx once.
#ifndef HAL_BODY
#include "common.h"

#include "grouped_swiglu_api.h"

#define HAL_SELF "grouped_swiglu.c"
#include "dtypes.h"

void hal_grouped_swiglu_fwd(int dtype, uintptr_t x, uintptr_t probs, uintptr_t y, int64_t rows, int64_t h) {
    HAL_DISPATCH(dtype, weighted_fwd, x, probs, y, rows, h);
}

void hal_grouped_swiglu_bwd(int dtype, uintptr_t x, uintptr_t probs, uintptr_t dy, uintptr_t dx, uintptr_t dprobs,
                            int64_t rows, int64_t h) {
    HAL_DISPATCH(dtype, weighted_bwd, x, probs, dy, dx, dprobs, rows, h);
}

#else

// 1 / (1 + exp(-x)); the exponential is infinite for very negative x, and the result 0.
HAL_INLINE real NAME(gate)(real x) { return 1 / (1 + RNAME(exp)(-x)); }

static void NAME(weighted_fwd)(uintptr_t x_, uintptr_t probs_, uintptr_t y_, int64_t rows, int64_t h) {
    const T *x = (const T *)x_;
    const real *probs = (const real *)probs_;
    T *y = (T *)y_;
    const int64_t row_bytes = h * (int64_t)sizeof(T);
    const int stream = streams(y_, rows * row_bytes, row_bytes);
#pragma omp parallel if (rows * h >= HAL_PARALLEL_MIN / 4)
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            const T *a = x + 2 * r * h, *b = a + h;
            const real p = probs[r];
            STORE_ROW(stream, y + r * h, h, i, LOAD(a + i) * NAME(gate)(LOAD(a + i)) * LOAD(b + i) * p);
        }
        if (stream) stream_end();
    }
}

static void NAME(weighted_bwd)(uintptr_t x_, uintptr_t probs_, uintptr_t dy_, uintptr_t dx_, uintptr_t dprobs_,
                               int64_t rows, int64_t h) {
    const T *x = (const T *)x_, *dy_all = (const T *)dy_;
    const real *probs = (const real *)probs_;
    T *dx = (T *)dx_;
    real *dprobs = (real *)dprobs_;
    const int64_t row_bytes = h * (int64_t)sizeof(T);
    const int stream = streams(dx_, 2 * rows * row_bytes, row_bytes);
#pragma omp parallel if (rows * h >= HAL_PARALLEL_MIN / 4)
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            const T *a = x + 2 * r * h, *b = a + h, *dy = dy_all + r * h;
            const real p = probs[r];
            if (dprobs) {
                real dot = 0;
                ROW_SUM(real, dot, h, i, LOAD(dy + i) * LOAD(a + i) * NAME(gate)(LOAD(a + i)) * LOAD(b + i));
                dprobs[r] = dot;
            }
            if (!dx) continue;
            T *da = dx + 2 * r * h, *db = da + h;
            STORE_ROW(stream, da, h, i,
                      p * LOAD(dy + i) * LOAD(b + i) * NAME(gate)(LOAD(a + i)) *
                          (1 + LOAD(a + i) * (1 - NAME(gate)(LOAD(a + i)))));
            STORE_ROW(stream, db, h, i, p * LOAD(dy + i) * LOAD(a + i) * NAME(gate)(LOAD(a + i)));
        }
        if (stream) stream_end();
    }
}

#endif
