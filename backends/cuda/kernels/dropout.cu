// philox_uniform, dropout and bias_dropout_add, forward and backward.
//
// A thread owns 16 bytes of adjacent columns (one column where alignment forbids it) and iterates over rows, so bias is
// read once and the bias gradient is summed in registers: piece p (blockIdx.y) writes its sums to partial[p], and
// column_sum (reduce.cu) adds them up in order. The backward pass draws the bits again; they are never stored.
//
// Memory traffic: dropout reads x, writes y; bias_dropout_add reads x and residual, writes y; backward reads dy, writes
// dx. Eight elements cost two Philox blocks (about 160 integer instructions), which on sm_80 and later overlap with
// memory access.
#include "common.h"

__global__ void __launch_bounds__(256) philox_uniform(float *out, Draw draw, i64 vec) {
    const i64 width = draw.sizes[3], rows = draw.rows();
    columns<4>(vec, width, [&](i64 j, auto w) {
        constexpr int W = decltype(w)::count;
        for (i64 r = blockIdx.y; r < rows; r += gridDim.y) {
            u32 bits[W];
            float y[W];
            philox_bits(draw, draw.row(r) + (u64)j, bits);
#pragma unroll
            for (int i = 0; i < W; i++) y[i] = (float)(bits[i] >> 8) * 0x1p-24f;
            store(out + r * width + j, y);
        }
    });
}

// y = residual + keep (x + bias) scale. X: element type of x and bias; Y: of y and residual. bias, residual: or null.
template <class X, class Y>
__global__ void __launch_bounds__(256)
    dropout(const X *x, const X *bias, const Y *residual, Y *y, Draw draw, i64 threshold, double scale_, i64 vec) {
    const i64 width = draw.sizes[3], rows = draw.rows();
    const float scale = (float)scale_;
    constexpr int V = Lanes<X>::count > Lanes<Y>::count ? Lanes<X>::count : Lanes<Y>::count;
    columns<V>(vec, width, [&](i64 j, auto w) {
        constexpr int W = decltype(w)::count;
        float b[W] = {};
        if (bias) load(bias + j, b);
        for (i64 r = blockIdx.y; r < rows; r += gridDim.y) {
            float v[W], res[W] = {};
            load(x + r * width + j, v);
            if (residual) load(residual + r * width + j, res);
            if (threshold) {
                u32 bits[W];
                philox_bits(draw, draw.row(r) + (u64)j, bits);
#pragma unroll
                for (int i = 0; i < W; i++) v[i] = bits[i] >> 8 >= (u32)threshold ? (v[i] + b[i]) * scale : 0.0f;
            } else {
#pragma unroll
                for (int i = 0; i < W; i++) v[i] = (v[i] + b[i]) * scale;
            }
#pragma unroll
            for (int i = 0; i < W; i++) v[i] += res[i];
            store(y + r * width + j, v);
        }
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
        for (i64 r = blockIdx.y; r < rows; r += gridDim.y) {
            float v[W];
            load(dy + r * width + j, v);
            if (threshold) {
                u32 bits[W];
                philox_bits(draw, draw.row(r) + (u64)j, bits);
#pragma unroll
                for (int i = 0; i < W; i++) v[i] = bits[i] >> 8 >= (u32)threshold ? v[i] * scale : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < W; i++) sum[i] += v[i];
            if (dx) store(dx + r * width + j, v);
        }
        if (partial) store(partial + blockIdx.y * width + j, sum);
    });
}

EXPORT(philox_uniform)
EXPORT(dropout<f32, f32>)
EXPORT(dropout<bf16, bf16>)
EXPORT(dropout<bf16, f32>)
EXPORT(dropout<f16, f16>)
EXPORT(dropout<f16, f32>)
EXPORT(dropout_bwd<f32, f32>)
EXPORT(dropout_bwd<bf16, bf16>)
EXPORT(dropout_bwd<bf16, f32>)
EXPORT(dropout_bwd<f16, f16>)
EXPORT(dropout_bwd<f16, f32>)
