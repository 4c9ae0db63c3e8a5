// SwiGLU, GEGLU and bias + GELU, forward and backward, one fused pass each.
//
// silu(v) = v s(v), gelu_tanh(v) = v s(2u) with u = sqrt(2/pi) (v + 0.044715 v^3), gelu_fast(v) = v s(1.702 v), where s is
// the sigmoid: one formula v s(z(v)) with derivative s + v s (1 - s) z'(v). gelu(v) = v Phi(v) with derivative
// Phi(v) + v phi(v); Phi comes from erfc(a) = exp(-a^2) erfcx(a), erfcx as a degree-9 polynomial in 1 / (1 + 0.35 a)
// fitted to a relative error of 1e-8, so small tails keep their relative accuracy.
// The kind of activation is a constant in each instance of the loops. The bias gradient is summed like a norm's weight
// gradient: in pieces of consecutive rows whose number depends on the shape only.
//
// Memory traffic: forward reads x, writes y; backward reads x and dy, writes dx. Nothing is stored in between: the
// backward pass recomputes the activation, which is cheaper than reading it.
#ifndef HAL_BODY
#include "common.h"

#include "activation_api.h"

enum { SILU = 0, GELU_ERF = 1, GELU_TANH = 2, GELU_FAST = 3 };

// Standard normal distribution and density.
HAL_INLINE void normal_f32(float v, float *cdf, float *pdf) {
    const float magnitude = v < 0 ? -v : v;
    const float t = 1.0f / (1.0f + 0.247487373f * magnitude);  // a = |v| / sqrt(2)
    float p = 0.037774532f;
    p = p * t + -0.155409299f;
    p = p * t + 0.172873453f;
    p = p * t + -0.0157737431f;
    p = p * t + 0.076634707f;
    p = p * t + 0.151902275f;
    p = p * t + 0.149045257f;
    p = p * t + 0.188389935f;
    p = p * t + 0.197075643f;
    p = p * t + 0.197487247f;
    const float gauss = fast_expf(-0.5f * v * v);
    const float tail = 0.5f * gauss * p * t;
    *cdf = v < 0 ? tail : 1.0f - tail;
    *pdf = 0.398942280f * gauss;
}

HAL_INLINE void normal_f64(double v, double *cdf, double *pdf) {
    *cdf = 0.5 * erfc(-v * 0.70710678118654752);
    *pdf = 0.39894228040143268 * exp(-0.5 * v * v);
}

#define HAL_SELF "activation.c"
#include "dtypes.h"

void hal_activation_fwd(int dtype, int kind, int gated, uintptr_t x, uintptr_t bias, uintptr_t y, int64_t rows,
                        int64_t width) {
    HAL_DISPATCH(dtype, activation_fwd, kind, gated, x, bias, y, rows, width);
}

void hal_activation_bwd(int dtype, int kind, int gated, uintptr_t x, uintptr_t bias, uintptr_t dy, uintptr_t dx,
                        uintptr_t dbias, int64_t rows, int64_t width) {
    HAL_DISPATCH(dtype, activation_bwd, kind, gated, x, bias, dy, dx, dbias, rows, width);
}

#else

// act(v) and, where slope is not null, act'(v). `kind` is a constant at every call.
HAL_INLINE real NAME(activate)(const int kind, real v, real *slope) {
    if (kind == GELU_ERF) {
        real cdf, pdf;
        RNAME(normal)(v, &cdf, &pdf);
        if (slope) *slope = cdf + v * pdf;
        return v * cdf;
    }
    const real c = (real)0.79788456080286536, k = (real)0.044715;
    const real z = kind == SILU ? v : kind == GELU_FAST ? (real)1.702 * v : 2 * c * (v + k * v * v * v);
    const real dz = kind == SILU ? 1 : kind == GELU_FAST ? (real)1.702 : 2 * c * (1 + 3 * k * v * v);
    const real s = 1 / (1 + RNAME(exp)(-z));
    if (slope) *slope = s + v * s * (1 - s) * dz;
    return v * s;
}

HAL_INLINE void NAME(fwd_row)(const int kind, const int gated, const int biased, const T *x, const real *bias, T *y,
                              int64_t width) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) {
        const real a = LOAD(x + i) + (biased ? bias[i] : 0);
        const real gate = gated ? LOAD(x + width + i) + (biased ? bias[width + i] : 0) : 1;
        STORE(y + i, NAME(activate)(kind, a, 0) * gate);
    }
}

HAL_INLINE void NAME(bwd_row)(const int kind, const int gated, const int biased, const T *x, const real *bias, const T *dy,
                              T *dx, real *db, int64_t width) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) {
        const real a = LOAD(x + i) + (biased ? bias[i] : 0), d = LOAD(dy + i);
        const real gate = gated ? LOAD(x + width + i) + (biased ? bias[width + i] : 0) : 1;
        real slope;
        const real value = NAME(activate)(kind, a, &slope);
        const real da = d * gate * slope, dgate = d * value;
        STORE(dx + i, da);
        if (gated) STORE(dx + width + i, dgate);
        if (biased) {
            db[i] += da;
            if (gated) db[width + i] += dgate;
        }
    }
}

#define EACH_KIND(call, ...)                                          \
    switch (kind * 4 + gated * 2 + (bias != 0)) {                     \
        case 2: call(SILU, 1, 0, __VA_ARGS__); break;                 \
        case 3: call(SILU, 1, 1, __VA_ARGS__); break;                 \
        case 4: call(GELU_ERF, 0, 0, __VA_ARGS__); break;             \
        case 5: call(GELU_ERF, 0, 1, __VA_ARGS__); break;             \
        case 6: call(GELU_ERF, 1, 0, __VA_ARGS__); break;             \
        case 7: call(GELU_ERF, 1, 1, __VA_ARGS__); break;             \
        case 8: call(GELU_TANH, 0, 0, __VA_ARGS__); break;            \
        case 9: call(GELU_TANH, 0, 1, __VA_ARGS__); break;            \
        case 10: call(GELU_TANH, 1, 0, __VA_ARGS__); break;           \
        case 11: call(GELU_TANH, 1, 1, __VA_ARGS__); break;           \
        case 12: call(GELU_FAST, 0, 0, __VA_ARGS__); break;           \
        case 13: call(GELU_FAST, 0, 1, __VA_ARGS__); break;           \
        case 14: call(GELU_FAST, 1, 0, __VA_ARGS__); break;           \
        case 15: call(GELU_FAST, 1, 1, __VA_ARGS__); break;           \
        default: break;                                               \
    }

static void NAME(activation_fwd)(int kind, int gated, uintptr_t x_, uintptr_t bias_, uintptr_t y_, int64_t rows,
                                 int64_t width) {
    const real *bias = (const real *)bias_;
    const int64_t x_width = gated ? 2 * width : width;
#pragma omp parallel for schedule(static) if (rows * width >= HAL_PARALLEL_MIN)
    for (int64_t row = 0; row < rows; row++) {
        const T *x = (const T *)x_ + row * x_width;
        T *y = (T *)y_ + row * width;
        EACH_KIND(NAME(fwd_row), x, bias, y, width);
    }
}

static void NAME(activation_bwd)(int kind, int gated, uintptr_t x_, uintptr_t bias_, uintptr_t dy_, uintptr_t dx_,
                                 uintptr_t dbias_, int64_t rows, int64_t width) {
    const real *bias = (const real *)bias_;
    const int64_t x_width = gated ? 2 * width : width, pieces = piece_count(rows, width);
    real *partial = bias ? hal_scratch((size_t)(pieces * x_width) * sizeof(real)) : 0;
#pragma omp parallel if (rows * width >= HAL_PARALLEL_MIN)
    {
#pragma omp for schedule(static)
        for (int64_t piece = 0; piece < pieces; piece++) {
            const int64_t begin = rows * piece / pieces, end = rows * (piece + 1) / pieces;
            real *db = partial ? partial + piece * x_width : 0;
            if (db) memset(db, 0, (size_t)x_width * sizeof(real));
            for (int64_t row = begin; row < end; row++) {
                const T *x = (const T *)x_ + row * x_width, *dy = (const T *)dy_ + row * width;
                T *dx = (T *)dx_ + row * x_width;
                EACH_KIND(NAME(bwd_row), x, bias, dy, dx, db, width);
            }
        }
        if (bias) RNAME(sum_pieces)(partial, pieces, x_width, x_width, (real *)dbias_);
    }
}
#undef EACH_KIND

#endif
