// philox_uniform, dropout and bias_dropout_add, forward and backward.
//
// A thread owns 16 bytes of adjacent columns (one column where alignment forbids it) and iterates over rows, so bias is
// read once and the bias gradient is summed in registers: piece p (blockIdx.y) writes its sums to partial[p], and
// column_sum (reduce.cu) adds them up in order. The backward pass draws the bits again; they are never stored.
//
// Memory traffic: dropout reads x, writes y; bias_dropout_add reads x and residual, writes y; backward reads dy, writes
// dx. Eight elements cost two Philox blocks, half of the kernel's instructions (docs/cuda-kernels.md).
#include "common.h"

// Where vec is set, columns are in vectors and every row's draw begins at a multiple of 4 (random.py).
template <int W> INLINE void draw_bits(const Draw &draw, u64 at, u32 (&bits)[W]) {
    if constexpr (W % 4 == 0) philox_blocks(draw, at, bits);
    else philox_bits(draw, at, bits);
}

__global__ void __launch_bounds__(256) philox_uniform(float *out, Draw draw, i64 vec) {
    const i64 width = draw.sizes[3], rows = draw.rows();
    columns<4>(vec, width, [&](i64 j, auto w) {
        constexpr int W = decltype(w)::count;
        DrawRows drawn(draw, blockIdx.y, gridDim.y);
        for (i64 r = blockIdx.y; r < rows; r += gridDim.y, drawn.next()) {
            u32 bits[W];
            float y[W];
            draw_bits(draw, drawn.at + (u64)j, bits);
#pragma unroll
            for (int i = 0; i < W; i++) y[i] = (float)(bits[i] >> 8) * 0x1p-24f;
            store(out + r * width + j, y);
        }
    });
}

// v = keep v scale, where an element is kept if the upper 24 bits of its word are not below the threshold (1 to 2^24).
template <int W> INLINE void keep(const Draw &draw, u64 at, i64 threshold, float scale, float (&v)[W]) {
    const u32 below = (u32)(threshold << 8) - 1u;
    u32 bits[W];
    draw_bits(draw, at, bits);
#pragma unroll
    for (int i = 0; i < W; i++) v[i] = bits[i] > below ? v[i] * scale : 0.0f;
}

// y = residual + keep (x + bias) scale, or keep x scale. X: element type of x and bias; Y: of y and residual. bias: or
// null. threshold: 0 for none dropped, where scale is 1, only with a residual.
template <class X, class Y, bool RESIDUAL>
__global__ void __launch_bounds__(256)
    dropout(const X *x, const X *bias, const Y *residual, Y *y, Draw draw, i64 threshold, double scale_, i64 vec) {
    const i64 width = draw.sizes[3], rows = draw.rows();
    const float scale = (float)scale_;
    constexpr int V = Lanes<X>::count > Lanes<Y>::count ? Lanes<X>::count : Lanes<Y>::count;
    columns<V>(vec, width, [&](i64 j, auto w) {
        constexpr int W = decltype(w)::count;
        [[maybe_unused]] float b[W] = {};
        if constexpr (RESIDUAL) {
            if (bias) load(bias + j, b);
        }
        DrawRows drawn(draw, blockIdx.y, gridDim.y);
        column_rows<RESIDUAL ? 2 : 4>(
            (u32)rows,
            [&](i64 r) {
                if constexpr (RESIDUAL)
                    return Pair<Raw<X, W>, Raw<Y, W>>{fetch<W>(x + r * width + j), fetch<W>(residual + r * width + j)};
                else return fetch<W>(x + r * width + j);
            },
            [&](i64 r, const auto &held) {
                float v[W];
                if constexpr (RESIDUAL) {
                    floats(held.a, v);
#pragma unroll
                    for (int i = 0; i < W; i++) v[i] += b[i];
                } else {
                    floats(held, v);
                }
                if (!RESIDUAL || threshold) keep(draw, drawn.at + (u64)j, threshold, scale, v);
                drawn.next();
                if constexpr (RESIDUAL) {
                    float res[W];
                    floats(held.b, res);
#pragma unroll
                    for (int i = 0; i < W; i++) v[i] += res[i];
                }
                store(y + r * width + j, v);
            });
    });
}

// dx = keep dy scale, partial[gridDim.y][width] = the column sums of dx per piece of rows. Either may be null.
template <class X, class Y>
__global__ void __launch_bounds__(256)
    dropout_bwd(const Y *dy, X *dx, float *partial, Draw draw, i64 threshold, double scale_, i64 vec) {
    const i64 width = draw.sizes[3], rows = draw.rows();
    const float scale = (float)scale_;
    constexpr int V = Lanes<X>::count > Lanes<Y>::count ? Lanes<X>::count : Lanes<Y>::count;
    columns<V>(vec, width, [&](i64 j, auto w) {
        constexpr int W = decltype(w)::count;
        float sum[W] = {};
        DrawRows drawn(draw, blockIdx.y, gridDim.y);
        column_rows<4>(
            (u32)rows, [&](i64 r) { return fetch<W>(dy + r * width + j); },
            [&](i64 r, const auto &held) {
                float v[W];
                floats(held, v);
                if (threshold) keep(draw, drawn.at + (u64)j, threshold, scale, v);
                drawn.next();
#pragma unroll
                for (int i = 0; i < W; i++) sum[i] += v[i];
                if (dx) store(dx + r * width + j, v);
            });
        if (partial) store(partial + blockIdx.y * width + j, sum);
    });
}

EXPORT(philox_uniform)
EXPORT(dropout<f32, f32, true>)
EXPORT(dropout<f32, f32, false>)
EXPORT(dropout<bf16, bf16, true>)
EXPORT(dropout<bf16, bf16, false>)
EXPORT(dropout<bf16, f32, true>)
EXPORT(dropout<f16, f16, true>)
EXPORT(dropout<f16, f16, false>)
EXPORT(dropout<f16, f32, true>)
EXPORT(dropout_bwd<f32, f32>)
EXPORT(dropout_bwd<bf16, bf16>)
EXPORT(dropout_bwd<bf16, f32>)
EXPORT(dropout_bwd<f16, f16>)
EXPORT(dropout_bwd<f16, f32>)
