// The probabilities of a tile whose queries see all its keys, computed in the registers of the product K Q^T: scores
// are neither stored nor searched for their maxima. (On a Zen 4 a store of 512 bits takes as long as one to one and a
// half multiply-adds, and the exponentials as long as their additions and roundings, not their multiply-adds.)
//
// P is relative to the maxima so far, which stay; beyond 2^SLACK, which P's bits show, the caller computes the tile
// like any other.
#if FA_FUSED
enum { NV = FA_QUERIES / W };

// Numbers that are not negative are in the order of their bits, and NaN is beyond them.
#ifdef FA_KIND_BF16
HAL_INLINE uvec largest(uvec a, uvec b) { return (uvec)_mm512_max_epu16((__m512i)a, (__m512i)b); }
HAL_INLINE int is_beyond_slack(uvec p) {
    return _mm512_cmpgt_epu16_mask((__m512i)p, _mm512_set1_epi16((short)((127 + SLACK) << 7))) != 0;
}
#else
HAL_INLINE uvec largest(uvec a, uvec b) { return (uvec)_mm512_max_epu32((__m512i)a, (__m512i)b); }
HAL_INLINE int is_beyond_slack(uvec p) {
    return _mm512_cmpgt_epu32_mask((__m512i)p, _mm512_set1_epi32((127 + SLACK) << 23)) != 0;
}
#endif

// exp2_of for finite x; NaN at -inf.
HAL_INLINE vec exp2_finite(const real *terms, vec x) {
    const vec n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_scalef_ps(polynomial(terms, x - n), n);
}

// Whether all queries of a tile see all its keys.
static int tile_whole(const struct tile *t, const struct fa_sequence *seq) {
    return t->keys % MR == 0 && !t->has_mask && !t->has_keep &&
           t->i0 + seq->hi >= t->k0 + t->keys - 1 && t->i0 + t->rows - 1 + seq->lo <= t->k0;
}

// P [keys / KU][48] = 2^(c K Q^T - c m) of a whole tile, whose sums are added to l. k: the tile's first key. Returns 0,
// and leaves l as it is, where P would exceed 2^SLACK, m is still -inf (also without 48 queries), or its rounding error
// counts.
static __attribute__((noinline)) int tile_fused(int keys, const unit *k, int64_t ldk, const unit *qt, int64_t depth,
                                                real c, const real *m, real *l, unit *p) {
    vec shift[NV], sum[NV];
    uvec top[NV];
    real constants[TERMS + 1];
    memcpy(constants, EXP2, sizeof EXP2);
    constants[TERMS] = c;
#pragma GCC unroll 3
    for (int n = 0; n < NV; n++) {
        shift[n] = load(m + n * W) * c;
        if (exceeds(max(shift[n], splat(0) - shift[n]), splat(COARSE))) return 0;
        sum[n] = (vec){0};
        top[n] = (uvec){0};
    }
    for (int key = 0; key < keys; key += MR, k += MR * ldk, p += MR / KU * FA_QUERIES) {
        // Without this, the compiler keeps the constants in registers during the product, and a sum of it in memory.
        const real *terms = constants;
        __asm__ volatile("" : "+r"(terms));
        vec acc[8][4];
        multiply(MR, NV, depth, k, ldk, 1, qt, FA_QUERIES, acc);
#pragma GCC unroll 8
        for (int i = 0; i < MR; i += KU)
#pragma GCC unroll 3
            for (int n = 0; n < NV; n++) {
                vec e[2];
#pragma GCC unroll 2
                for (int u = 0; u < KU; u++) {
                    e[u] = exp2_finite(terms, acc[i + u][n] * terms[TERMS] - shift[n]);
                    sum[n] += e[u];
                }
                const uvec units = pair(e[0], e[KU - 1]);
                top[n] = largest(top[n], units);
                store_units(p + i / KU * FA_QUERIES + n * W, units);
            }
    }
#pragma GCC unroll 3
    for (int n = 0; n < NV; n++)
        if (is_beyond_slack(top[n])) return 0;
#pragma GCC unroll 3
    for (int n = 0; n < NV; n++) store(l + n * W, load(l + n * W) + sum[n]);
    return 1;
}
#endif
