// SwiGLU, GEGLU and bias + GELU, forward and backward, one fused pass each.
//
// With s the sigmoid, silu(v) = v s(v), gelu_tanh(v) = v s(2 sqrt(2/pi) (v + 0.044715 v^3)), gelu_fast(v) = v s(1.702 v):
// one family v s(z) with z = v (a + b v^2) and derivative s + v s (1 - s) (a + 3 b v^2). gelu(v) = v Phi(v) has derivative
// Phi(v) + v phi(v); Phi comes from erfc(t) = exp(-t^2) erfcx(t), erfcx as a degree-9 polynomial in 1 / (1 + 0.35 t) fitted
// to a relative error of 1e-8, so small tails keep their relative accuracy.
// Whether erf, gate and bias take part is a constant in each instance of the loops. The bias gradient is summed like a
// norm's weight gradient, in pieces of consecutive rows (see piece_count).
//
// Memory traffic: forward reads x, writes y; backward reads x and dy, writes dx (large results past the caches). Nothing
// is stored in between: the backward pass recomputes the activation, which is cheaper than reading it.
#ifndef HAL_BODY
#include "common.h"

#include "activation_api.h"

enum { SILU = 0, GELU_ERF = 1, GELU_TANH = 2, GELU_FAST = 3 };

typedef struct {
    double a, b;
} family_t;

static family_t family_of(int kind) {
    const double c = 2 * 0.79788456080286536;  // 2 sqrt(2/pi)
    return kind == SILU ? (family_t){1, 0} : kind == GELU_FAST ? (family_t){1.702, 0} : (family_t){c, 0.044715 * c};
}

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

// Returns act(v); *slope = act'(v), not computed where it is not used.
HAL_INLINE real NAME(activate)(const int erf, real v, real a, real b, real *slope) {
    if (erf) {
        real cdf, pdf;
        RNAME(normal)(v, &cdf, &pdf);
        *slope = cdf + v * pdf;
        return v * cdf;
    }
    real square = v * v;
    square = square > (real)1e30 ? (real)1e30 : square;  // b = 0 times inf would be NaN
    const real s = 1 / (1 + RNAME(exp)(-v * (a + b * square)));
    *slope = s + v * s * (1 - s) * (a + 3 * b * square);
    return v * s;
}

HAL_INLINE real NAME(fwd_one)(const int erf, const int gated, const int biased, const T *x, const real *bias, int64_t i,
                              int64_t width, real a, real b) {
    const real v = LOAD(x + i) + (biased ? bias[i] : 0);
    const real gate = gated ? LOAD(x + width + i) + (biased ? bias[width + i] : 0) : 1;
    real slope;
    return NAME(activate)(erf, v, a, b, &slope) * gate;
}

HAL_INLINE void NAME(fwd_row)(const int erf, const int gated, const int biased, const T *x, const real *bias, T *y,
                              int64_t width, real a, real b, int stream) {
    STORE_ROW(stream, y, width, i, NAME(fwd_one)(erf, gated, biased, x, bias, i, width, a, b));
}

// Of `count` columns; dgate and the gate's half of x, bias and db lie `width` further on.
HAL_INLINE void NAME(bwd_some)(const int erf, const int gated, const int biased, const T *x, const real *bias, const T *dy,
                               T *dx, T *dgates, double *db, int64_t count, int64_t width, real a, real b) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        const real v = LOAD(x + i) + (biased ? bias[i] : 0), d = LOAD(dy + i);
        const real gate = gated ? LOAD(x + width + i) + (biased ? bias[width + i] : 0) : 1;
        real slope;
        const real value = NAME(activate)(erf, v, a, b, &slope), dv = d * gate * slope, dgate = d * value;
        STORE(dx + i, dv);
        if (gated) STORE(dgates + i, dgate);
        if (biased) db[i] += dv;
        if (biased && gated) db[width + i] += dgate;
    }
}

HAL_INLINE void NAME(bwd_row)(const int erf, const int gated, const int biased, const T *x, const real *bias, const T *dy,
                              T *dx, double *db, int64_t width, real a, real b, int stream) {
    enum { LINE = 64 / sizeof(T) };
    int64_t i = 0;
    for (; stream && i + LINE <= width; i += LINE) {
        _Alignas(64) T line[2 * LINE];
        const real *bias_i = biased ? bias + i : 0;
        double *db_i = biased ? db + i : 0;
        NAME(bwd_some)(erf, gated, biased, x + i, bias_i, dy + i, line, line + LINE, db_i, LINE, width, a, b);
        STREAM_LINE(dx + i, line);
        if (gated) STREAM_LINE(dx + width + i, line + LINE);
    }
    if (i == 0) NAME(bwd_some)(erf, gated, biased, x, bias, dy, dx, dx + width, db, width, width, a, b);
}

#define EACH_VARIANT(call, ...)                                            \
    switch (4 * (kind == GELU_ERF) + 2 * (gated != 0) + (bias != 0)) {     \
        case 0: call(0, 0, 0, __VA_ARGS__); break;                         \
        case 1: call(0, 0, 1, __VA_ARGS__); break;                         \
        case 2: call(0, 1, 0, __VA_ARGS__); break;                         \
        case 3: call(0, 1, 1, __VA_ARGS__); break;                         \
        case 4: call(1, 0, 0, __VA_ARGS__); break;                         \
        case 5: call(1, 0, 1, __VA_ARGS__); break;                         \
        case 6: call(1, 1, 0, __VA_ARGS__); break;                         \
        default: call(1, 1, 1, __VA_ARGS__);                               \
    }

static void NAME(activation_fwd)(int kind, int gated, uintptr_t x_, uintptr_t bias_, uintptr_t y_, int64_t rows,
                                 int64_t width) {
    const real *bias = (const real *)bias_;
    const int64_t x_width = gated ? 2 * width : width;
    const family_t family = family_of(kind);
    const int64_t row_bytes = width * (int64_t)sizeof(T);
    const int stream = streams(y_, rows * row_bytes, row_bytes);
#pragma omp parallel if (rows * width >= HAL_PARALLEL_MIN)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const T *x = (const T *)x_ + row * x_width;
            T *y = (T *)y_ + row * width;
            EACH_VARIANT(NAME(fwd_row), x, bias, y, width, (real)family.a, (real)family.b, stream);
        }
        if (stream) stream_end();
    }
}

static void NAME(activation_bwd)(int kind, int gated, uintptr_t x_, uintptr_t bias_, uintptr_t dy_, uintptr_t dx_,
                                 uintptr_t dbias_, int64_t rows, int64_t width) {
    const real *bias = (const real *)bias_;
    const int64_t x_width = gated ? 2 * width : width, pieces = piece_count(rows);
    const family_t family = family_of(kind);
    const int64_t row_bytes = width * (int64_t)sizeof(T);
    // Not beside running sums, which it makes slower by more than it saves (measured).
    const int stream = !bias && streams(dx_, rows * x_width * (int64_t)sizeof(T), row_bytes);
    double *partial = bias ? hal_scratch((size_t)(pieces * x_width) * sizeof(double)) : 0;
#pragma omp parallel if (rows * width >= HAL_PARALLEL_MIN)
    {
#pragma omp for schedule(static)
        for (int64_t piece = 0; piece < pieces; piece++) {
            const int64_t begin = rows * piece / pieces, end = rows * (piece + 1) / pieces;
            double *db = partial ? partial + piece * x_width : 0;
            if (db) memset(db, 0, (size_t)x_width * sizeof(double));
            for (int64_t row = begin; row < end; row++) {
                const T *x = (const T *)x_ + row * x_width, *dy = (const T *)dy_ + row * width;
                T *dx = (T *)dx_ + row * x_width;
                EACH_VARIANT(NAME(bwd_row), x, bias, dy, dx, db, width, (real)family.a, (real)family.b, stream);
            }
        }
        if (stream) stream_end();
        if (bias) RNAME(sum_pieces)(partial, pieces, x_width, x_width, (real *)dbias_);
    }
}
#undef EACH_VARIANT

#endif
