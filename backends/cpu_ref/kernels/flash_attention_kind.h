// One arithmetic kind of flash attention; included once by each flash_attention_<kind>.c.
//
// Uses compiler vectors (vectors.h), and intrinsics only for instructions that these cannot express.
#pragma once
#include "flash_attention_plan.h"
#include "philox.h"

#include <omp.h>

#include "vectors.h"

enum {
    SUB_VECTORS = FA_SUB / W,
    PAD = 16,
    SLACK = 8,  // exponentials may be relative to an earlier maximum as long as they do not exceed 2^SLACK
};

// Whether scores become probabilities in the registers of their product (flash_attention_fused.h).
#if FA_VECTOR_BYTES == 64 && !defined(FA_KIND_F64) && !FA_TILES
#define FA_FUSED 1
#else
#define FA_FUSED 0
#endif

HAL_INLINE vec select(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }
// All bits set where the byte is not 0. (Intrinsics, because compilers widen bytes by single inserts.)
HAL_INLINE ivec lanes_of(const uint8_t *bytes) {
#if FA_VECTOR_BYTES == 64 && !defined(FA_KIND_F64)
    return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes)) != 0;
#elif FA_VECTOR_BYTES == 32 && !defined(FA_KIND_F64)
    return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes)) != 0;
#else
    return __builtin_convertvector(*(const bytes_at *)bytes, ivec) != 0;
#endif
}

// max: b where either is NaN. exceeds: whether a > b in any lane.
#if FA_VECTOR_BYTES == 64 && defined(FA_KIND_F64)
HAL_INLINE vec max(vec a, vec b) { return _mm512_max_pd(a, b); }
HAL_INLINE int exceeds(vec a, vec b) { return _mm512_cmp_pd_mask(a, b, _CMP_GT_OQ) != 0; }
#elif FA_VECTOR_BYTES == 64
HAL_INLINE vec max(vec a, vec b) { return _mm512_max_ps(a, b); }
HAL_INLINE int exceeds(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
#else
#if FA_VECTOR_BYTES == 32 && !defined(FA_KIND_F64)
HAL_INLINE vec max(vec a, vec b) { return _mm256_max_ps(a, b); }
#else
HAL_INLINE vec max(vec a, vec b) { return select(a > b, a, b); }
#endif
HAL_INLINE int exceeds(vec a, vec b) {
    const ivec greater = a > b;
    lane any = 0;
    for (int l = 0; l < W; l++) any |= greater[l];
    return any != 0;
}
#endif

// 2^x for x <= 0 (and slightly above): x = n + r, |r| <= 1/2, 2^r by a minimax polynomial with p(0) = 1 (relative error
// 9e-8). 0 gives exactly 1, -inf exactly 0, NaN stays NaN. AVX-512 has instructions for r and for scaling by 2^n;
// elsewhere the exponent bits are set directly, with 0 below 2^-127: adding 1.5 * 2^23 + 127 leaves n + 127 in the low
// bits.
#ifdef FA_KIND_F64
HAL_INLINE vec log2_of(vec x) {
    for (int l = 0; l < W; l++) x[l] = log2(x[l]);
    return x;
}
HAL_INLINE vec exp2_of(vec x) {
    for (int l = 0; l < W; l++) x[l] = exp2(x[l]);
    return x;
}
#else
// log2(x) of a normal x > 0; NaN stays NaN. x = 2^n (1 + t), 1 + t from sqrt(1/2) to sqrt(2), log2(1 + t) / t by a
// polynomial (relative error 1.4e-7).
HAL_INLINE vec log2_of(vec x) {
    const ivec n = ((ivec)x - 0x3f3504f3) >> 23;
    const vec t = (vec)((ivec)x - (n << 23)) - 1.0f;
    vec p = t * 0x1.01b6e4p-3f - 0x1.a87d18p-3f;
    p = p * t + 0x1.b9c91cp-3f;
    p = p * t - 0x1.e95be6p-3f;
    p = p * t + 0x1.26d384p-2f;
    p = p * t - 0x1.715c4ep-2f;
    p = p * t + 0x1.ec73d6p-2f;
    p = p * t - 0x1.715470p-1f;
    p = p * t + 0x1.715476p+0f;
    return p * t + __builtin_convertvector(n, vec) + (x - x);
}
#ifdef FA_KIND_BF16  // relative error 3e-6, a thousandth of bfloat16's rounding
static const real EXP2[] = {0x1.3a02cc9fdb194p-7f, 0x1.c9fc45e1e25e2p-5f, 0x1.ec037755a3ab9p-3f,
                            0x1.62e12c9c3bccdp-1f, 1};
#else
static const real EXP2[] = {0x1.5bba13e573030p-10f, 0x1.3cea878f12ce4p-7f, 0x1.c6b752e06b0dcp-5f,
                            0x1.ebf9bb89e2839p-3f, 0x1.62e4292034e08p-1f, 1};
#endif
enum { TERMS = sizeof EXP2 / sizeof *EXP2 };

// 2^r for |r| <= 1/2 by EXP2 or a copy of it.
HAL_INLINE vec polynomial(const real *terms, vec r) {
    vec p = r * terms[0] + terms[1];
#pragma GCC unroll 4
    for (int i = 2; i < TERMS; i++) p = p * r + terms[i];
    return p;
}

HAL_INLINE vec exp2_of(vec x) {
#if FA_VECTOR_BYTES == 64
    const vec r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vec n = x - r;
#else
    x = max(splat(-127.0f), x);
    const vec shifted = x + (12582912.0f + 127.0f);
    const vec r = x - (shifted - (12582912.0f + 127.0f));
#endif
    const vec p = polynomial(EXP2, r);
#if FA_VECTOR_BYTES == 64
    return _mm512_scalef_ps(p, n);
#else
    return p * (vec)((ivec)shifted << 23);
#endif
}
#endif

// Beyond this, the rounding error of a shift is more than exp2 tolerates.
#ifdef FA_KIND_F64
#define COARSE 0x1p59
#else
#define COARSE 0x1p30f
#endif

#include "gemm.h"
#include "transpose.h"
#include "flash_attention_pack.h"
#include "flash_attention_scores.h"
#include "flash_attention_tile.h"
#include "flash_attention_fused.h"
#include "flash_attention_forward.h"
#include "flash_attention_decode.h"
#include "flash_attention_backward.h"

// Up to FA_DECODE_QUERIES queries are bound by the memory traffic of K and V: they take the decode path, which has no
// dropout. Its pieces are complete heads, because so few queries fit into one tile.
static void run_piece(const struct fa_call *call, const struct fa_piece *piece, const struct forward_space *space,
                      struct packed *packed) {
    const struct fa_sequence seq = fa_sequence(call, piece->batch);
    if (seq.sq > 0 && seq.sq <= FA_DECODE_QUERIES && !call->shape->dropout_threshold) {
        packed->batch = -1;  // decoding overwrites the packed keys
        decode_piece(call, &seq, piece->kv_head, space);
    } else {
        forward_piece(call, &seq, piece, space, packed);
    }
}

int CAT(fa_forward_, FA_KIND)(const struct fa_call *call, const struct fa_plan *plan) {
    struct carver counter = {NULL, 0};
    forward_carve(&counter, call, plan);
    // The additional bytes make threads start at different offsets within a page.
    const size_t bytes = (counter.used + 4095) / 4096 * 4096 + 256;
    char *workspace = fa_acquire(bytes * (size_t)plan->threads);
    if (!workspace) return 1;
#pragma omp parallel num_threads(plan->threads)
    {
        struct carver carver = {workspace + bytes * (size_t)omp_get_thread_num(), 0};
        const struct forward_space space = forward_carve(&carver, call, plan);
        struct packed packed = {.batch = -1};
        tiles_begin(TILE);
        for (int64_t s; (s = fa_next_segment(plan, omp_get_thread_num())) >= 0;)
            for (int64_t p = plan->segments[s]; p < plan->segments[s + 1]; p++)
                run_piece(call, &plan->pieces[p], &space, &packed);
        tiles_end();
    }
    fa_release(workspace);
    return 0;
}
