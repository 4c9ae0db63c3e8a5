// swiglu, geglu and bias_gelu, forward and backward: y = act(a + bias_a) [* (b + bias_b)], where a and b are the halves
// of a row of x if gated, and a is the row if not.
//
// A thread owns 16 bytes of adjacent columns (one column where alignment forbids it) and iterates over rows, so the
// bias is read once and its gradient is summed in registers (see dropout.cu).
//
// Memory traffic: forward reads x, writes y; backward reads x and dy, writes dx.
#include "common.h"

enum { SILU = 0, GELU_ERF = 1, GELU_TANH = 2, GELU_FAST = 3 };

// act(x), and its derivative in `slope`. All kinds but GELU_ERF are x s with s = 1 / (1 + exp(-x (A + B x^2))).
//
// GELU_ERF is x Phi(x), with Phi from erfc(a) = exp(-a^2) erfcx(a), a = |x| / sqrt(2), erfcx(a) = t p(t) with p a
// polynomial of degree 9 and t = 1 / (1 + 0.35 a), fitted to a relative error of 1e-8, so that small tails keep their
// relative accuracy. The density needs the same exponential.
template <int KIND> INLINE float activate(float x, float &slope) {
    if constexpr (KIND == GELU_ERF) {
        constexpr float P[] = {0.037774532f,  -0.155409299f, 0.172873453f, -0.0157737431f, 0.076634707f,
                               0.151902275f, 0.149045257f,  0.188389935f, 0.197075643f,   0.197487247f};
        const float t = reciprocal(1.0f + 0.247487373f * fabsf(x)), gauss = power_of_2(-0.5f * LOG2_E * x * x);
        float p = P[0];
#pragma unroll
        for (int i = 1; i < 10; i++) p = p * t + P[i];
        const float tail = 0.5f * gauss * p * t, cdf = x < 0.0f ? tail : 1.0f - tail;
        slope = cdf + x * 0.39894228f * gauss;
        return x * cdf;
    } else {
        constexpr float A = KIND == SILU ? 1.0f : KIND == GELU_FAST ? 1.702f : 1.59576912f;
        constexpr float B = KIND == GELU_TANH ? 0.044715f * A : 0.0f;
        // 1 - s is e s: the difference would have the error of the reciprocal. Where e would be infinite, it is 2^126.
        const float e = power_of_2(fminf(-LOG2_E * x * (A + B * x * x), 126.0f)), s = reciprocal(1.0f + e), y = x * s;
        slope = s + y * e * s * (A + 3.0f * B * x * x);
        return y;
    }
}

template <class T, bool GATED, int KIND>
__global__ void __launch_bounds__(256)
    activation_fwd(const T *x_, const T *bias, T *y, i64 rows, i64 width, i64 vec) {
    const i64 full = width * (GATED ? 2 : 1);
    columns<Lanes<T>::count>(vec, width, [&](i64 j, auto w) {
        constexpr int W = decltype(w)::count;
        float bias_a[W] = {};
        [[maybe_unused]] float bias_b[W] = {};
        if (bias) load(bias + j, bias_a);
        if constexpr (GATED) {
            if (bias) load(bias + width + j, bias_b);
        }
        column_rows<GATED ? 2 : 4>(
            rows,
            [&](i64 r) {
                const T *x = x_ + r * full + j;
                if constexpr (GATED) return Pair<Raw<T, W>, Raw<T, W>>{fetch<W>(x), fetch<W>(x + width)};
                else return fetch<W>(x);
            },
            [&](i64 r, const auto &held) {
                float a[W], slope;
                [[maybe_unused]] float b[W];
                if constexpr (GATED) floats(held.a, a), floats(held.b, b);
                else floats(held, a);
#pragma unroll
                for (int i = 0; i < W; i++) {
                    a[i] = activate<KIND>(a[i] + bias_a[i], slope);
                    if constexpr (GATED) a[i] *= b[i] + bias_b[i];
                }
                store(y + r * width + j, a);
            });
    });
}

// partial: [gridDim.y][width of x], the column sums of dx per piece of rows, or 0.
template <class T, bool GATED, int KIND>
__global__ void __launch_bounds__(256, GATED ? 2 : 3)
    activation_bwd(const T *x_, const T *bias, const T *dy, T *dx_, float *partial, i64 rows, i64 width, i64 vec) {
    const i64 full = width * (GATED ? 2 : 1);
    columns<Lanes<T>::count>(vec, width, [&](i64 j, auto w) {
        constexpr int W = decltype(w)::count;
        float bias_a[W] = {}, sum_a[W] = {};
        [[maybe_unused]] float bias_b[W] = {}, sum_b[W] = {};
        if (bias) load(bias + j, bias_a);
        if constexpr (GATED) {
            if (bias) load(bias + width + j, bias_b);
        }
        column_rows<2>(
            rows,
            [&](i64 r) {
                const T *x = x_ + r * full + j, *d = dy + r * width + j;
                if constexpr (GATED)
                    return Triple<Raw<T, W>, Raw<T, W>, Raw<T, W>>{fetch<W>(x), fetch<W>(d), fetch<W>(x + width)};
                else return Pair<Raw<T, W>, Raw<T, W>>{fetch<W>(x), fetch<W>(d)};
            },
            [&](i64 r, const auto &held) {
                T *dx = dx_ + r * full + j;
                float a[W], d[W], slope;
                [[maybe_unused]] float b[W];
                floats(held.a, a);
                floats(held.b, d);
                if constexpr (GATED) floats(held.c, b);
#pragma unroll
                for (int i = 0; i < W; i++) {
                    const float value = activate<KIND>(a[i] + bias_a[i], slope);
                    if constexpr (GATED) {
                        a[i] = d[i] * slope * (b[i] + bias_b[i]);
                        b[i] = d[i] * value;
                        sum_b[i] += b[i];
                    } else {
                        a[i] = d[i] * slope;
                    }
                    sum_a[i] += a[i];
                }
                store(dx, a);
                if constexpr (GATED) store(dx + width, b);
            });
        if (partial) {
            store(partial + blockIdx.y * full + j, sum_a);
            if constexpr (GATED) store(partial + blockIdx.y * full + width + j, sum_b);
        }
    });
}

EXPORT(activation_fwd<f32, true, SILU>)
EXPORT(activation_fwd<bf16, true, SILU>)
EXPORT(activation_fwd<f16, true, SILU>)
EXPORT(activation_fwd<f32, true, GELU_ERF>)
EXPORT(activation_fwd<bf16, true, GELU_ERF>)
EXPORT(activation_fwd<f16, true, GELU_ERF>)
EXPORT(activation_fwd<f32, true, GELU_TANH>)
EXPORT(activation_fwd<bf16, true, GELU_TANH>)
EXPORT(activation_fwd<f16, true, GELU_TANH>)
EXPORT(activation_fwd<f32, true, GELU_FAST>)
EXPORT(activation_fwd<bf16, true, GELU_FAST>)
EXPORT(activation_fwd<f16, true, GELU_FAST>)
EXPORT(activation_fwd<f32, false, GELU_ERF>)
EXPORT(activation_fwd<bf16, false, GELU_ERF>)
EXPORT(activation_fwd<f16, false, GELU_ERF>)
EXPORT(activation_fwd<f32, false, GELU_TANH>)
EXPORT(activation_fwd<bf16, false, GELU_TANH>)
EXPORT(activation_fwd<f16, false, GELU_TANH>)
EXPORT(activation_fwd<f32, false, GELU_FAST>)
EXPORT(activation_fwd<bf16, false, GELU_FAST>)
EXPORT(activation_fwd<f16, false, GELU_FAST>)
EXPORT(activation_bwd<f32, true, SILU>)
EXPORT(activation_bwd<bf16, true, SILU>)
EXPORT(activation_bwd<f16, true, SILU>)
EXPORT(activation_bwd<f32, true, GELU_ERF>)
EXPORT(activation_bwd<bf16, true, GELU_ERF>)
EXPORT(activation_bwd<f16, true, GELU_ERF>)
EXPORT(activation_bwd<f32, true, GELU_TANH>)
EXPORT(activation_bwd<bf16, true, GELU_TANH>)
EXPORT(activation_bwd<f16, true, GELU_TANH>)
EXPORT(activation_bwd<f32, true, GELU_FAST>)
EXPORT(activation_bwd<bf16, true, GELU_FAST>)
EXPORT(activation_bwd<f16, true, GELU_FAST>)
EXPORT(activation_bwd<f32, false, GELU_ERF>)
EXPORT(activation_bwd<bf16, false, GELU_ERF>)
EXPORT(activation_bwd<f16, false, GELU_ERF>)
EXPORT(activation_bwd<f32, false, GELU_TANH>)
EXPORT(activation_bwd<bf16, false, GELU_TANH>)
EXPORT(activation_bwd<f16, false, GELU_TANH>)
EXPORT(activation_bwd<f32, false, GELU_FAST>)
EXPORT(activation_bwd<bf16, false, GELU_FAST>)
EXPORT(activation_bwd<f16, false, GELU_FAST>)
