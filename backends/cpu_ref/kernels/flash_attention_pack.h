// Moving tiles between tensors (any strides, any type) and packed units: conversion, padding, transposition.

static int64_t element_size(int64_t dtype) { return dtype == HAL_F32 ? 4 : dtype == HAL_F64 ? 8 : 2; }
static int64_t padded(int64_t n) { return (n + PAD - 1) / PAD * PAD; }
static int64_t units(int64_t elements) { return (elements + KU - 1) / KU; }

#ifdef FA_KIND_BF16
typedef uint32_t row_at __attribute__((vector_size(32), aligned(1), may_alias));
#endif

// Whether elements of dtype are `real` without conversion.
static int is_real(int64_t dtype) { return dtype == (sizeof(real) == 8 ? HAL_F64 : HAL_F32); }
// Whether KU adjacent elements of dtype are a unit without conversion.
static int is_unit(int64_t dtype) { return KU == 2 ? dtype == HAL_BF16 : is_real(dtype); }

#ifdef FA_KIND_BF16
// 16 + 16 halves, lane by lane: the first half's lane goes to the low half of a unit, the second one's to the high half.
HAL_INLINE uvec interleaved(__m512i halves) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (uvec)_mm512_permutexvar_epi16(order, halves);
}
// Rounds to bfloat16; lane by lane, `even` goes to the low half and `odd` to the high half of a unit.
HAL_INLINE uvec pair(vec even, vec odd) {
    return interleaved((__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
}
// Writes 16 adjacent elements, which are 8 units along the row.
HAL_INLINE void store_rounded(void *p, vec v) { *(row_at *)p = (row_at)_mm512_cvtneps_pbh((__m512)v); }
#else
HAL_INLINE uvec pair(vec even, vec odd) { return (void)odd, even; }
HAL_INLINE void store_rounded(void *p, vec v) { store(p, v); }
#endif

#ifndef FA_KIND_BF16
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

// The row as real: the row itself if no conversion is needed, otherwise converted into buffer.
static const real *as_real(real *buffer, const char *src, int64_t dtype, int64_t n) {
    if (is_real(dtype)) return (const real *)src;
    read_row(buffer, src, dtype, n);
    return buffer;
}
#endif

#ifdef FA_KIND_BF16
HAL_INLINE uvec widened(const bf16 *p) { return (uvec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
#define ROUNDING_ERROR(v, rounded) ((v) - (vec)(widened((const bf16 *)(rounded)) << 16))
#else
#define ROUNDING_ERROR(v, rounded) ((void)(rounded), (v) - (v))
#endif

// Writes scale * src[0..n), rounded to dtype. rest, if not NULL, receives the rounding error.
static void write_row(char *dst, char *rest, const real *src, real scale, int64_t dtype, int64_t n) {
    if (is_unit(dtype) && n % W == 0) {
        for (int64_t e = 0; e < n; e += W) {
            const int64_t at = e / KU * (int64_t)sizeof(unit);
            const vec v = load(src + e) * scale;
            store_rounded(dst + at, v);
            if (rest) store_rounded(rest + at, ROUNDING_ERROR(v, dst + at));
        }
        return;
    }
#define WRITE(T)                                                                        \
    _Pragma("omp simd") for (int64_t e = 0; e < n; e++) store_##T((T *)dst + e, scale * src[e]); \
    for (int64_t e = 0; rest && e < n; e++)                                             \
        store_##T((T *)rest + e, scale * src[e] - load_##T((const T *)dst + e))
#ifdef FA_KIND_F64
    (void)dtype;
    WRITE(f64);
#else
    if (dtype == HAL_F32) {
        WRITE(f32);
    } else if (dtype == HAL_BF16) {
        WRITE(bf16);
    } else {
        WRITE(f16);
    }
#endif
#undef WRITE
}

// Prefetches the rows that are read next, unless they are adjacent: the hardware prefetcher helps little at a stride (on a
// Zen 4 this saves 4 to 6 % at strides of 1 and 2 KB), and not at all above a page.
// (Always inlined, because compilers remove calls without a visible effect.)
HAL_INLINE void fetch_rows(const char *row, int64_t stride, int64_t rows, int64_t bytes) {
    if (stride <= bytes) return;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + r * stride + at, 0, 2);
}

// dst [rows][ld] = rows of n elements as units along the row, zero up to ld.
static void pack_rows(unit *dst, int64_t ld, const char *src, int64_t stride, int64_t dtype, int64_t rows, int64_t n) {
    if (is_unit(dtype) && n == ld * KU) {  // avoids memset and memcpy, whose calls take longer than copying a short row
        for (int64_t r = 0; r < rows; r++, dst += ld, src += stride)
            for (int64_t e = 0; e < ld; e += W) store_units(dst + e, load_units((const unit *)src + e));
        return;
    }
    for (int64_t r = 0; r < rows; r++, dst += ld, src += stride) {
        memset(dst + n / KU, 0, (size_t)(ld - n / KU) * sizeof(unit));
#ifdef FA_KIND_BF16
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
        if (r + 1 < rows && n == ld) {
            for (int64_t e = 0; e < n; e += W) store_units(dst + e, widened(even + e) | widened(odd + e) << 16);
            continue;
        }
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

// Prefetches the rows of the next sweep, a few at each step of the present one. A tile takes FA_STEPS steps: with fewer,
// the core would wait for a free line buffer. Rows that are far apart are not prefetched, because they would evict one
// another from the few cache sets they map to.
enum { FA_STEPS = FA_SUBS + 4 };
struct ahead {
    struct rows_ahead {
        const char *row;
        int64_t stride, bytes, rows, share;  // rows left, and how many of them a step prefetches
    } of[6];
    int count;
    int64_t steps;
};

static void ahead_add(struct ahead *a, const char *row, int64_t stride, int64_t bytes, int64_t rows) {
    if (rows > 0 && rows * stride <= FA_AHEAD)
        a->of[a->count++] = (struct rows_ahead){row, stride, bytes, rows, (rows + a->steps - 1) / a->steps};
}

static void ahead_step(struct ahead *a) {
    for (int i = 0; i < a->count; i++) {
        struct rows_ahead *of = &a->of[i];
        for (int64_t n = 0; n < of->share && of->rows > 0; n++, of->rows--, of->row += of->stride)
            for (int64_t at = 0; at < of->bytes; at += 64) __builtin_prefetch(of->row + at, 0, 2);
    }
}

// Prefetches a row that is written some rows later; otherwise the core waits for the lines of one row at a time.
HAL_INLINE void fetch_for_write(const char *row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 1, 3);
}

// Rows of a tensor = scale[q] * src [rows][padded]. rest, if not NULL, receives the rounding errors.
static void write_tile(char *dst, char *rest, int64_t stride, int64_t dtype, const real *src, const real *scale,
                       int64_t rows, int64_t n) {
    const int64_t bytes = n * element_size(dtype), after = 4096 / bytes + 1;
    for (int64_t r = -after; r < rows; r++) {
        if (r + after < rows) fetch_for_write(dst + (r + after) * stride, bytes);
        if (r + after < rows && rest) fetch_for_write(rest + (r + after) * stride, bytes);
        if (r < 0) continue;
        write_row(dst + r * stride, rest ? rest + r * stride : NULL, src + r * padded(n), scale[r], dtype, n);
    }
}
