// Rotary position embedding: (a, b) -> (a cos - b sin, b cos + a sin) for the pairs (i, i + half), or (2i, 2i + 1) when
// interleaved. The gradient is the same rotation with -sin.
//
// The caller passes strides for rows and for the angles of a row, so that SBND, BSND, BNSD and TND, with angles per
// position or per sample and position, are one loop over rows of d channels. Blocks of 64 rows are split over threads;
// the three row coordinates are computed by division once per block and incremented from there.
//
// Memory traffic: reads x and writes y once; cos and sin (half each per position) come from cache for all heads but
// one.
#ifndef HAL_BODY
#include "common.h"

#include "rotary_api.h"

enum { BLOCK = 64 };

#define HAL_SELF "rotary.c"
#include "dtypes.h"

void hal_rotary(int dtype, int interleaved, double sign, uintptr_t x, uintptr_t cos, uintptr_t sin, uintptr_t y, int64_t n0,
                int64_t n1, int64_t n2, int64_t d, int64_t half, int64_t xs0, int64_t xs1, int64_t xs2, int64_t cs0,
                int64_t cs1, int64_t cs2) {
    const int64_t xs[3] = {xs0, xs1, xs2}, cs[3] = {cs0, cs1, cs2};
    HAL_DISPATCH(dtype, rotary, interleaved, sign, x, cos, sin, y, n0 * n1 * n2, n1, n2, d, half, xs, cs);
}

#else

HAL_INLINE void NAME(rotate)(int interleaved, real sign, const T *x, const real *cosine, const real *sine, T *y, int64_t d,
                             int64_t half) {
    if (interleaved) {
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
            const real a = LOAD(x + 2 * i), b = LOAD(x + 2 * i + 1), c = cosine[i], s = sign * sine[i];
            STORE(y + 2 * i, a * c - b * s);
            STORE(y + 2 * i + 1, b * c + a * s);
        }
    } else {
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
            const real a = LOAD(x + i), b = LOAD(x + half + i), c = cosine[i], s = sign * sine[i];
            STORE(y + i, a * c - b * s);
            STORE(y + half + i, b * c + a * s);
        }
    }
    if (d > 2 * half) memcpy(y + 2 * half, x + 2 * half, (size_t)(d - 2 * half) * sizeof(T));
}

static void NAME(rotary)(int interleaved, double sign, uintptr_t x_, uintptr_t cos_, uintptr_t sin_, uintptr_t y_,
                         int64_t rows, int64_t n1, int64_t n2, int64_t d, int64_t half, const int64_t *xs,
                         const int64_t *cs) {
    const T *x = (const T *)x_;
    const real *cosine = (const real *)cos_, *sine = (const real *)sin_;
    T *y = (T *)y_;
#pragma omp parallel for schedule(static) if (rows * d >= HAL_PARALLEL_MIN)
    for (int64_t begin = 0; begin < rows; begin += BLOCK) {
        const int64_t end = begin + BLOCK < rows ? begin + BLOCK : rows;
        int64_t i2 = begin % n2, i1 = begin / n2 % n1, i0 = begin / n2 / n1;
        for (int64_t row = begin; row < end; row++) {
            const int64_t angle = i0 * cs[0] + i1 * cs[1] + i2 * cs[2];
            const T *from = x + i0 * xs[0] + i1 * xs[1] + i2 * xs[2];
            NAME(rotate)(interleaved, (real)sign, from, cosine + angle, sine + angle, y + row * d, d, half);
            if (++i2 == n2) {
                i2 = 0;
                if (++i1 == n1) i1 = 0, i0++;
            }
        }
    }
}

#endif
