// Transposition of units (vectors.h) in registers.
#pragma once
#include "vectors.h"

// A W x W block in registers is transposed in log2(W) steps, which exchange elements between registers i and i + s. The
// steps within the 128-bit parts of a register come first, because those shuffles are the cheapest.
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
enum { PART = 16 / (int)sizeof(unit) };  // lanes of 128 bits

HAL_INLINE void exchange(uvec r[16], int s, ivec low, ivec high) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
        if (i & s) continue;
        const uvec a = r[i], b = r[i + s];
        r[i] = SHUFFLE(a, b, low);
        r[i + s] = SHUFFLE(a, b, high);
    }
}

// In each 128-bit part: interleaves runs of s lanes from the lower (upper) halves of both registers.
HAL_INLINE void interleave(uvec r[16], int s) {
    ivec low, high;
#pragma GCC unroll 16
    for (int l = 0; l < W; l++) {
        const int run = l % PART / s;
        low[l] = l / PART * PART + run / 2 * s + l % s + run % 2 * W;
        high[l] = low[l] + PART / 2;
    }
    exchange(r, s, low, high);
}

// The even (odd) 128-bit parts of the first register, then those of the second.
HAL_INLINE void gather_parts(uvec r[16], int s) {
    ivec low, high;
#pragma GCC unroll 16
    for (int l = 0; l < W; l++) {
        low[l] = l % (W / 2) / PART * 2 * PART + l % PART + 2 * l / W * W;
        high[l] = low[l] + PART;
    }
    exchange(r, s, low, high);
}

HAL_INLINE void transpose_block(uvec r[16]) {
    interleave(r, 1);
    if (PART == 4) {
        interleave(r, 2);
#pragma GCC unroll 4
        for (int i = 0; i < W; i += 4) {  // interleave(r, 2) leaves the rows in the order 0, 2, 1, 3
            const uvec second = r[i + 1];
            r[i + 1] = r[i + 2];
            r[i + 2] = second;
        }
    }
    if (W > (int)PART) gather_parts(r, PART);
    if (W > 2 * (int)PART) gather_parts(r, 2 * PART);
}

// dst [columns][ldd] = transpose of src [rows][lds]; rows and columns are multiples of 16.
static void transpose(unit *dst, int64_t ldd, const unit *src, int64_t lds, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i += W)
        for (int64_t j = 0; j < columns; j += W) {
            uvec r[16];
#pragma GCC unroll 16
            for (int l = 0; l < W; l++) r[l] = load_units(src + (i + l) * lds + j);
            transpose_block(r);
#pragma GCC unroll 16
            for (int l = 0; l < W; l++) store_units(dst + (j + l) * ldd + i, r[l]);
        }
}
