// Rotary position embedding: pair (a, b) of a head becomes (a cos - b sin, b cos + a sin). The backward pass is the
// same kernel with sin negated. Pairs are (i, i + r/2), or (2i, 2i + 1) if INTERLEAVED; channels from r on pass
// through.
//
// A thread rotates W elements of a head's first half with their partners, or W interleaved elements, or copies W
// elements beyond them. All layouts are expressed by strides: rows are [d0, d1, d2] with any strides, heads are
// contiguous. W elements are 16 bytes, or the smallest unit (1, interleaved 2) where alignment or sizes forbid that.
//
// Memory traffic: reads x, writes y; cos and sin are shared by all heads and come from L2.
#include "common.h"

struct Turn {
    i64 sizes[3], channels, half, x[3], angle[3];
    double sign;
};

template <class T, int W, bool INTERLEAVED>
__global__ void __launch_bounds__(256) rotary(const T *x_, const float *cos_, const float *sin_, T *y_, Turn t) {
    const u32 half = (u32)t.half, channels = (u32)t.channels, rest = W > 2 || !INTERLEAVED ? W : 1;
    const u32 turning = INTERLEAVED ? 2 * half / W : half / W, chunks = turning + (channels - 2 * half) / rest;
    const i64 total = t.sizes[0] * t.sizes[1] * t.sizes[2] * chunks;
    const float sign = (float)t.sign;
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < total; at += (i64)gridDim.x * blockDim.x) {
        const i64 row = at / chunks, outer = row / t.sizes[2], i2 = row - outer * t.sizes[2];
        const u32 chunk = (u32)(at - row * chunks);
        const i64 i0 = outer / t.sizes[1], i1 = outer - i0 * t.sizes[1];
        const T *x = x_ + i0 * t.x[0] + i1 * t.x[1] + i2 * t.x[2];
        T *y = y_ + row * channels;
        if (chunk >= turning) {
            const u32 j = 2 * half + (chunk - turning) * rest;
            if constexpr (W > 2 || !INTERLEAVED) {
                float v[W];
                load(x + j, v);
                store(y + j, v);
            } else {
                y[j] = x[j];
            }
            continue;
        }
        const i64 angle = i0 * t.angle[0] + i1 * t.angle[1] + i2 * t.angle[2];
        if constexpr (INTERLEAVED) {
            float v[W], c[W / 2], s[W / 2];
            load(x + chunk * W, v);
            load(cos_ + angle + chunk * (W / 2), c);
            load(sin_ + angle + chunk * (W / 2), s);
#pragma unroll
            for (int i = 0; i < W / 2; i++) {
                const float a = v[2 * i], b = v[2 * i + 1];
                v[2 * i] = a * c[i] - b * s[i] * sign;
                v[2 * i + 1] = b * c[i] + a * s[i] * sign;
            }
            store(y + chunk * W, v);
        } else {
            float a[W], b[W], c[W], s[W];
            const u32 j = chunk * W;
            load(x + j, a);
            load(x + half + j, b);
            load(cos_ + angle + j, c);
            load(sin_ + angle + j, s);
#pragma unroll
            for (int i = 0; i < W; i++) {
                const float first = a[i] * c[i] - b[i] * s[i] * sign;
                b[i] = b[i] * c[i] + a[i] * s[i] * sign;
                a[i] = first;
            }
            store(y + j, a);
            store(y + half + j, b);
        }
    }
}

EXPORT(rotary<f32, 4, false>)
EXPORT(rotary<bf16, 8, false>)
EXPORT(rotary<f16, 8, false>)
EXPORT(rotary<f32, 1, false>)
EXPORT(rotary<bf16, 1, false>)
EXPORT(rotary<f16, 1, false>)
EXPORT(rotary<f32, 4, true>)
EXPORT(rotary<bf16, 8, true>)
EXPORT(rotary<f16, 8, true>)
EXPORT(rotary<f32, 2, true>)
EXPORT(rotary<bf16, 2, true>)
EXPORT(rotary<f16, 2, true>)
