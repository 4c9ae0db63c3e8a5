// Moving tiles between tensors (any strides, any type) and packed units: conversion, padding, transposition.

static int64_t element_size(int64_t dtype) { return dtype == HAL_F32 ? 4 : dtype == HAL_F64 ? 8 : 2; }
static int64_t padded(int64_t n) { return (n + PAD - 1) / PAD * PAD; }
static int64_t units(int64_t elements) { return (elements + KU - 1) / KU; }

#ifdef FA_KIND_BF16
typedef uint32_t row_at __attribute__((vector_size(32), aligned(1), may_alias));
#endif

// dst[0..n) = the row as real.
static void read_row(real *dst, const char *src, int64_t dtype, int64_t n) {
#ifdef FA_KIND_F64
    (void)dtype;
    memcpy(dst, src, (size_t)n * sizeof(real));
#else
    if (dtype == HAL_F32) {
        memcpy(dst, src, (size_t)n * sizeof(real));
    } else if (dtype == HAL_BF16) {
#pragma omp simd
        for (int64_t e = 0; e < n; e++) dst[e] = load_bf16((const bf16 *)src + e);
    } else {
#pragma omp simd
        for (int64_t e = 0; e < n; e++) dst[e] = load_f16((const f16 *)src + e);
    }
#endif
}

// The row = scale * src[0..n), rounded to dtype.
static void write_row(char *dst, const real *src, real scale, int64_t dtype, int64_t n) {
#ifdef FA_KIND_F64
    (void)dtype;
    for (int64_t e = 0; e < n; e++) ((double *)dst)[e] = scale * src[e];
#else
    if (dtype == HAL_F32) {
#pragma omp simd
        for (int64_t e = 0; e < n; e++) ((float *)dst)[e] = scale * src[e];
    } else if (dtype == HAL_BF16) {
#pragma omp simd
        for (int64_t e = 0; e < n; e++) store_bf16((bf16 *)dst + e, scale * src[e]);
    } else {
#pragma omp simd
        for (int64_t e = 0; e < n; e++) store_f16((f16 *)dst + e, scale * src[e]);
    }
#endif
}

// dst [rows][ld] = rows of n elements as units along the row, zero up to ld.
static void pack_rows(unit *dst, int64_t ld, const char *src, int64_t stride, int64_t dtype, int64_t rows, int64_t n) {
    for (int64_t r = 0; r < rows; r++, dst += ld, src += stride) {
        memset(dst + n / KU, 0, (size_t)(ld - n / KU) * sizeof(unit));
#ifdef FA_KIND_BF16
        (void)dtype;
        memcpy(dst, src, (size_t)n * sizeof(bf16));
#else
        read_row(dst, src, dtype, n);
#endif
    }
}

// dst [units(rows)][ld] = rows of n elements as units along the column: unit [r][e] holds rows KU r ... of channel e.
#ifdef FA_KIND_BF16
static void pack_pairs(unit *dst, int64_t ld, const char *src, int64_t stride, int64_t dtype, int64_t rows, int64_t n) {
    (void)dtype;
    for (int64_t r = 0; r < rows; r += 2, dst += ld, src += 2 * stride) {
        const bf16 *even = (const bf16 *)src, *odd = (const bf16 *)(src + stride);
        if (r + 1 < rows) {
#pragma omp simd
            for (int64_t e = 0; e < n; e++) dst[e] = (uint32_t)even[e] | (uint32_t)odd[e] << 16;
        } else {
#pragma omp simd
            for (int64_t e = 0; e < n; e++) dst[e] = even[e];
        }
        memset(dst + n, 0, (size_t)(ld - n) * sizeof(unit));
    }
}
#else
#define pack_pairs pack_rows
#endif

#ifdef FA_KIND_BF16
// Lane by lane, even in the low half and odd in the high half of a unit, rounded to bfloat16.
HAL_INLINE uvec pair(vec even, vec odd) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (uvec)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
}
// 16 adjacent elements = 8 units along the row.
HAL_INLINE void store_rounded(void *p, vec v) { *(row_at *)p = (row_at)_mm512_cvtneps_pbh((__m512)v); }
#else
HAL_INLINE uvec pair(vec even, vec odd) { return (void)odd, even; }
HAL_INLINE void store_rounded(void *p, vec v) { store(p, v); }
#endif

// A W x W block in registers is transposed in log2(W) steps; step s swaps the off-diagonal s x s blocks.
#if defined(__GNUC__) && !defined(__clang__)
#define SHUFFLE(a, b, mask) __builtin_shuffle(a, b, mask)
#else
HAL_INLINE uvec shuffle_lanes(uvec a, uvec b, ivec mask) {
    uvec out;
    for (int l = 0; l < W; l++) out[l] = mask[l] < W ? a[mask[l]] : b[mask[l] - W];
    return out;
}
#define SHUFFLE(a, b, mask) shuffle_lanes(a, b, mask)
#endif

HAL_INLINE void transpose_step(uvec r[16], int s) {
    ivec low, high;
#pragma GCC unroll 16
    for (int l = 0; l < W; l++) {
        low[l] = l & s ? l - s + W : l;
        high[l] = l & s ? l + W : l + s;
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
        if (i & s) continue;
        const uvec a = r[i], b = r[i + s];
        r[i] = SHUFFLE(a, b, low);
        r[i + s] = SHUFFLE(a, b, high);
    }
}

// dst [columns][ldd] = transpose of src [rows][lds]; both multiples of 16.
static void transpose(unit *dst, int64_t ldd, const unit *src, int64_t lds, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i += W)
        for (int64_t j = 0; j < columns; j += W) {
            uvec r[16];
#pragma GCC unroll 16
            for (int l = 0; l < W; l++) r[l] = load_units(src + (i + l) * lds + j);
            transpose_step(r, 1);
            if (W > 2) transpose_step(r, 2);
            if (W > 4) transpose_step(r, 4);
            if (W > 8) transpose_step(r, 8);
#pragma GCC unroll 16
            for (int l = 0; l < W; l++) store_units(dst + (j + l) * ldd + i, r[l]);
        }
}

// dst rows i0.. of a tensor = scale[q] * transpose of src [channels][FA_QUERIES]; `rows` real ones. rest, if not NULL, gets
// what rounding took away.
static void write_tile(char *dst, char *rest, int64_t stride, int64_t dtype, const real *src, const real *scale,
                       int64_t rows, int64_t n, real *buffer, real *rounded) {
    const int64_t ld = padded(n);
    transpose((unit *)buffer, ld, (const unit *)src, FA_QUERIES, ld, FA_QUERIES);
    for (int64_t r = 0; r < rows; r++) {
        real *row = buffer + r * ld;
        write_row(dst + r * stride, row, scale[r], dtype, n);
        if (!rest) continue;
        read_row(rounded, dst + r * stride, dtype, n);
#pragma omp simd
        for (int64_t e = 0; e < n; e++) row[e] = row[e] * scale[r] - rounded[e];
        write_row(rest + r * stride, row, 1, dtype, n);
    }
}
