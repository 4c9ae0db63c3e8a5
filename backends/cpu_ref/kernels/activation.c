// SwiGLU, GEGLU and bias + GELU, forward and backward, one fused pass each.
//
// With s the sigmoid, silu(v) = v s(v), gelu_tanh(v) = v s(2 sqrt(2/pi) (v + 0.044715 v^3)), gelu_fast(v) = v s(1.702
// v): one family v s(z) with z = v (a + b v^2) and derivative s + v s (1 - s) (a + 3 b v^2). gelu(v) = v Phi(v) has
// derivative Phi(v) + v phi(v); Phi comes from erfc(a) = exp(-a^2) erfcx(a), a = |v| / sqrt(2), erfcx(a) = t p(t)
// with p a polynomial of degree 9 and t = 1 / (1 + 0.35 a), fitted to a relative error of 1e-8, so small tails keep their relative accuracy.
// Rows are processed in blocks of 64 columns, whose intermediate values stay in L1. Large rows that do not begin on a
// cache line are processed in pieces of such blocks (see streams in common.h). The bias gradient is summed over pieces
// of consecutive rows (see piece_count), like a norm's weight gradient.
//
// Memory traffic: forward reads x, writes y; backward reads x and dy, writes dx. Large results are written with
// non-temporal stores. Nothing is stored in between: the backward pass recomputes the activation, which is cheaper than
// reading it.
#ifndef HAL_BODY
#include "common.h"

#include "activation_api.h"

enum { SILU = 0, GELU_ERF = 1, GELU_TANH = 2, GELU_FAST = 3 };

enum {
    BLOCK = 64,  // columns
    AHEAD = 16384,  // bytes between the block being processed and the one being prefetched
    ROWS = 4,    // rows whose bias gradients are added in real before they go into the running sums in double
};

typedef struct {
    double a, b;
    int erf;
} family_t;

static family_t family_of(int kind) {
    const double c = 2 * 0.79788456080286536;  // 2 sqrt(2/pi)
    if (kind == GELU_TANH) return (family_t){c, 0.044715 * c, 0};
    return (family_t){kind == GELU_FAST ? 1.702 : 1, 0, kind == GELU_ERF};
}

// Standard normal distribution and density.
HAL_INLINE void normal_f32(float v, float *cdf, float *pdf) {
    const float magnitude = v < 0 ? -v : v;
    const float t = 1.0f / (1.0f + 0.247487373f * magnitude);
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
    const float gauss = low_expf(-0.5f * v * v);
    const float tail = 0.5f * gauss * p * t;
    *cdf = v < 0 ? tail : 1.0f - tail;
    *pdf = 0.398942280f * gauss;
}

// s[i] = 1 / (1 + exp(-z[i])) for a block.
#ifdef __AVX512F__
// Four vectors are interleaved, because one chain of dependent instructions of this length fills the scheduler before
// half of it is done. The clamps are one instruction each; compilers generate that from C only if they ignore NaN.
HAL_INLINE void sigmoids_f32(float *s, const float *z) {
    __m512 x[4], n[4], r[4], q[4], even[4], odd[4];
#define EACH for (int k = 0; k < 4; k++)
#define ALL(c) _mm512_set1_ps(c)
    for (int i = 0; i < BLOCK; i += 64) {
        EACH x[k] = _mm512_sub_ps(ALL(0.0f), _mm512_load_ps(z + i + 16 * k));
        // Min and max return the second operand if it is NaN.
        EACH x[k] = _mm512_max_ps(ALL(-88.0f), _mm512_min_ps(ALL(89.5f), x[k]));
        // exp(x) as fast_expf computes it, except for the order of the polynomial's terms.
        EACH n[k] = _mm512_fmadd_ps(x[k], ALL(EXP_LOG2_E), ALL(EXP_ROUND));
        EACH n[k] = _mm512_sub_ps(n[k], ALL(EXP_ROUND));
        EACH r[k] = _mm512_fnmadd_ps(n[k], ALL(EXP_LN2_HIGH), x[k]);
        EACH r[k] = _mm512_fnmadd_ps(n[k], ALL(EXP_LN2_LOW), r[k]);
        EACH q[k] = _mm512_mul_ps(r[k], r[k]);
        EACH even[k] = _mm512_fmadd_ps(ALL(EXP_6), q[k], ALL(EXP_4));
        EACH odd[k] = _mm512_fmadd_ps(ALL(EXP_5), q[k], ALL(EXP_3));
        EACH even[k] = _mm512_fmadd_ps(even[k], q[k], ALL(EXP_2));
        EACH even[k] = _mm512_fmadd_ps(odd[k], r[k], even[k]);
        EACH r[k] = _mm512_add_ps(r[k], ALL(1.0f));
        EACH r[k] = _mm512_fmadd_ps(even[k], q[k], r[k]);
        EACH r[k] = _mm512_scalef_ps(r[k], n[k]);
        EACH _mm512_store_ps(s + i + 16 * k, _mm512_div_ps(ALL(1.0f), _mm512_add_ps(ALL(1.0f), r[k])));
    }
#undef EACH
#undef ALL
}
#else
HAL_INLINE void sigmoids_f32(float *s, const float *z) {
#pragma omp simd
    for (int i = 0; i < BLOCK; i++) s[i] = 1 / (1 + fast_expf(-z[i]));
}
#endif

HAL_INLINE void sigmoids_f64(double *s, const double *z) {
    for (int i = 0; i < BLOCK; i++) s[i] = 1 / (1 + exp(-z[i]));
}

HAL_INLINE void normal_f64(double v, double *cdf, double *pdf) {
    *cdf = 0.5 * erfc(-v * 0.70710678118654752);
    *pdf = 0.39894228040143268 * exp(-0.5 * v * v);
}

#define HAL_SELF "activation.c"
#ifndef HAL_OTHERS
#define HAL_F32_ONLY
#endif
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

HAL_INLINE real NAME(square)(real v) {
    const real square = v * v;
    return square > (real)1e30 ? (real)1e30 : square;  // 0 * inf would be NaN where b = 0
}

// value[i] = act(x[i] + bias[i]) and, unless slope is 0, slope[i] = act'(x[i] + bias[i]), for `columns` <= BLOCK
// columns.
HAL_INLINE void NAME(activate)(const T *x, const real *bias, int64_t columns, family_t family, real *value, real *slope) {
    _Alignas(64) real v[BLOCK], z[BLOCK], s[BLOCK];
    const real a = (real)family.a, b = (real)family.b;
    if (family.erf) {
#pragma omp simd
        for (int64_t i = 0; i < columns; i++) {
            const real vi = LOAD(x + i) + (bias ? bias[i] : 0);
            real cdf, pdf;
            RNAME(normal)(vi, &cdf, &pdf);
            value[i] = vi * cdf;
            if (slope) slope[i] = cdf + vi * pdf;
        }
        return;
    }
    if (columns < BLOCK) memset(z, 0, sizeof z);
#pragma omp simd
    for (int64_t i = 0; i < columns; i++) {
        v[i] = LOAD(x + i) + (bias ? bias[i] : 0);
        z[i] = v[i] * (a + b * NAME(square)(v[i]));
    }
    RNAME(sigmoids)(s, z);
#pragma omp simd
    for (int64_t i = 0; i < columns; i++) {
        value[i] = v[i] * s[i];
        if (slope) slope[i] = s[i] + v[i] * s[i] * (1 - s[i]) * (a + 3 * b * NAME(square)(v[i]));
    }
}

HAL_INLINE void NAME(put)(int stream, T *to, const real *values, int64_t columns) {
    enum { LINE = 64 / sizeof(T) };
    int64_t i = 0;
    for (; i + LINE <= columns; i += LINE) NAME(store_line)(stream == STREAM_LINES, to + i, values + i);
    for (; i < columns; i++) STORE(to + i, values[i]);
}

HAL_INLINE void NAME(prefetch_block)(const T *block, int64_t columns) {
    PREFETCH((uintptr_t)block + AHEAD, columns * (int64_t)sizeof(T), 3);
}

HAL_INLINE void NAME(fwd_columns)(int gated, const T *x, const real *bias, T *y, int64_t columns, int64_t width,
                                  family_t family, int stream) {
    _Alignas(64) real value[BLOCK];
    if (stream) NAME(prefetch_block)(x, columns);
    if (stream && gated) NAME(prefetch_block)(x + width, columns);
    NAME(activate)(x, bias, columns, family, value, 0);
    if (gated) {
#pragma omp simd
        for (int64_t i = 0; i < columns; i++) value[i] *= LOAD(x + width + i) + (bias ? bias[width + i] : 0);
    }
    NAME(put)(stream, y, value, columns);
}

// dx, and its contribution to the sums db. The gated half of x, bias and db begins at offset `width`, that of dx at
// dx_width.
HAL_INLINE void NAME(bwd_columns)(int gated, const T *x, const real *bias, const T *dy, T *dx, int64_t dx_width, real *db,
                                  int64_t columns, int64_t width, family_t family, int stream) {
    _Alignas(64) real value[BLOCK], slope[BLOCK];
    if (stream) NAME(prefetch_block)(x, columns);
    if (stream && gated) NAME(prefetch_block)(x + width, columns);
    if (stream) NAME(prefetch_block)(dy, columns);
    NAME(activate)(x, bias, columns, family, value, slope);
    if (gated) {
#pragma omp simd
        for (int64_t i = 0; i < columns; i++) {
            const real d = LOAD(dy + i);
            slope[i] *= d * (LOAD(x + width + i) + (bias ? bias[width + i] : 0));
            value[i] *= d;
            if (bias) db[i] += slope[i];
            if (bias) db[width + i] += value[i];
        }
        NAME(put)(stream, dx + dx_width, value, columns);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < columns; i++) {
            slope[i] *= LOAD(dy + i);
            if (bias) db[i] += slope[i];
        }
    }
    NAME(put)(stream, dx, slope, columns);
}

// Whole blocks are called with compile-time constants, except for arguments whose cost per block is negligible.
static void NAME(fwd_span)(int gated, const T *x, const real *bias, T *y, int64_t columns, int64_t width, family_t family,
                           int stream) {
    int64_t i = 0;
    if (bias)
        for (; i + BLOCK <= columns; i += BLOCK)
            NAME(fwd_columns)(gated, x + i, bias + i, y + i, BLOCK, width, family, stream);
    else
        for (; i + BLOCK <= columns; i += BLOCK)
            NAME(fwd_columns)(gated, x + i, 0, y + i, BLOCK, width, family, stream);
    if (i < columns)
        NAME(fwd_columns)(gated, x + i, bias ? bias + i : 0, y + i, columns - i, width, family, stream);
}

static void NAME(bwd_span)(int gated, const T *x, const real *bias, const T *dy, T *dx, int64_t dx_width, real *db,
                           int64_t columns, int64_t width, family_t family, int stream) {
    int64_t i = 0;
    if (bias)
        for (; i + BLOCK <= columns; i += BLOCK)
            NAME(bwd_columns)(gated, x + i, bias + i, dy + i, dx + i, dx_width, db + i, BLOCK, width, family, stream);
    else
        for (; i + BLOCK <= columns; i += BLOCK)
            NAME(bwd_columns)(gated, x + i, 0, dy + i, dx + i, dx_width, 0, BLOCK, width, family, stream);
    if (i < columns)
        NAME(bwd_columns)(gated, x + i, bias ? bias + i : 0, dy + i, dx + i, dx_width, bias ? db + i : 0, columns - i,
                          width, family, stream);
}

enum { NAME(PIECE) = STREAM_PIECE / sizeof(T) };

static void NAME(fwd_row)(int gated, const T *x, const real *bias, T *y, int64_t width, family_t family, int stream) {
    if (stream != STREAM_PIECES) {
        NAME(fwd_span)(gated, x, bias, y, width, width, family, stream);
        return;
    }
    _Alignas(64) T piece[NAME(PIECE)];
    for (int64_t i = 0; i < width; i += NAME(PIECE)) {
        const int64_t columns = i + NAME(PIECE) < width ? NAME(PIECE) : width - i;
        NAME(fwd_span)(gated, x + i, bias ? bias + i : 0, piece, columns, width, family, stream);
        stream_copy(y + i, piece, columns * (int64_t)sizeof(T));
    }
}

static void NAME(bwd_row)(int gated, const T *x, const real *bias, const T *dy, T *dx, real *db, int64_t width,
                          family_t family, int stream) {
    if (stream != STREAM_PIECES) {
        NAME(bwd_span)(gated, x, bias, dy, dx, width, db, width, width, family, stream);
        return;
    }
    _Alignas(64) T pieces[2 * NAME(PIECE)];
    for (int64_t i = 0; i < width; i += NAME(PIECE)) {
        const int64_t columns = i + NAME(PIECE) < width ? NAME(PIECE) : width - i;
        NAME(bwd_span)(gated, x + i, bias ? bias + i : 0, dy + i, pieces, NAME(PIECE), bias ? db + i : 0, columns, width,
                       family, stream);
        for (int half = 0; half <= gated; half++)
            stream_copy(dx + half * width + i, pieces + half * NAME(PIECE), columns * (int64_t)sizeof(T));
    }
}

// sums += recent; recent = 0.
static void NAME(move_sums)(double *sums, real *recent, int64_t width) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) {
        sums[i] += recent[i];
        recent[i] = 0;
    }
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
            NAME(fwd_row)(gated, x, bias, y, width, family, stream);
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
    // Ordinary stores with a bias: non-temporal ones were measured slower while its gradient is accumulated.
    const int stream = bias ? STREAM_NOT : streams(dx_, rows * x_width * (int64_t)sizeof(T), row_bytes);
    double *partial = bias ? hal_scratch((size_t)(pieces * x_width) * (sizeof(double) + sizeof(real))) : 0;
#pragma omp parallel if (rows * width >= HAL_PARALLEL_MIN)
    {
#pragma omp for schedule(static)
        for (int64_t piece = 0; piece < pieces; piece++) {
            const int64_t begin = rows * piece / pieces, end = rows * (piece + 1) / pieces;
            double *db = partial ? partial + piece * x_width : 0;
            real *recent = partial ? (real *)(partial + pieces * x_width) + piece * x_width : 0;
            if (db) memset(db, 0, (size_t)x_width * sizeof(double));
            if (db) memset(recent, 0, (size_t)x_width * sizeof(real));
            for (int64_t row = begin; row < end; row++) {
                const T *x = (const T *)x_ + row * x_width, *dy = (const T *)dy_ + row * width;
                T *dx = (T *)dx_ + row * x_width;
                NAME(bwd_row)(gated, x, bias, dy, dx, recent, width, family, stream);
                if (db && ((row - begin) % ROWS == ROWS - 1 || row == end - 1)) NAME(move_sums)(db, recent, x_width);
            }
        }
        if (stream) stream_end();
        if (bias) RNAME(sum_pieces)(partial, pieces, x_width, x_width, (real *)dbias_);
    }
}

#endif
