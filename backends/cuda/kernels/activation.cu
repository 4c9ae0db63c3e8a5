// swiglu, geglu and bias_gelu, forward and backward: y = act(a + bias_a) [* (b + bias_b)], where a and b are the halves
// of a row of x if gated, and a is the row if not.
//
// A thread owns 16 bytes of adjacent columns (one column where alignment forbids it) and iterates over rows, so the
// bias is read once and its gradient is summed in registers (see dropout.cu). The kind of activation is a run-time
// parameter with one branch at the start of the kernel.
//
// Memory traffic: forward reads x, writes y; backward reads x and dy, writes dx.
#include "common.h"

enum { SILU = 0, GELU_ERF = 1, GELU_TANH = 2, GELU_FAST = 3 };

INLINE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// act(x), and its derivative in `slope`.
template <int KIND> INLINE float activate(float x, float &slope) {
    if constexpr (KIND == GELU_ERF) {
        const float cdf = 0.5f * (1.0f + erff(x * 0.70710678f));
        slope = cdf + x * 0.39894228f * expf(-0.5f * x * x);
        // 1 + erff would lose the lower tail, where cdf is the difference of two numbers near 1; erfcf keeps it.
        return x < 0.0f ? x * 0.5f * erfcf(x * -0.70710678f) : x * cdf;
    } else if constexpr (KIND == GELU_TANH) {
        const float t = tanhf(0.79788456f * (x + 0.044715f * x * x * x));
        slope = 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.79788456f * (1.0f + 0.134145f * x * x);
        return 0.5f * x * (1.0f + t);
    } else {
        constexpr float rate = KIND == SILU ? 1.0f : 1.702f;
        const float s = sigmoid(rate * x);
        slope = s * (1.0f + rate * x * (1.0f - s));
        return x * s;
    }
}

template <class T, bool GATED, int KIND>
INLINE void forward(const T *x_, const T *bias, T *y, i64 rows, i64 width, i64 vec) {
    columns<Lanes<T>::count>(vec, width, [&](i64 j, auto w) {
        constexpr int W = decltype(w)::count;
        float bias_a[W] = {}, bias_b[W] = {};
        if (bias) load(bias + j, bias_a);
        if (bias && GATED) load(bias + width + j, bias_b);
        for (i64 r = blockIdx.y; r < rows; r += gridDim.y) {
            const T *x = x_ + r * width * (GATED ? 2 : 1);
            float a[W], slope;
            [[maybe_unused]] float b[W];
            load(x + j, a);
            if constexpr (GATED) load(x + width + j, b);
#pragma unroll
            for (int i = 0; i < W; i++) {
                a[i] = activate<KIND>(a[i] + bias_a[i], slope);
                if constexpr (GATED) a[i] *= b[i] + bias_b[i];
            }
            store(y + r * width + j, a);
        }
    });
}

template <class T, bool GATED, int KIND>
INLINE void backward(const T *x_, const T *bias, const T *dy, T *dx_, float *partial, i64 rows, i64 width, i64 vec) {
    const i64 full = width * (GATED ? 2 : 1);
    columns<Lanes<T>::count>(vec, width, [&](i64 j, auto w) {
        constexpr int W = decltype(w)::count;
        float bias_a[W] = {}, sum_a[W] = {};
        [[maybe_unused]] float bias_b[W] = {}, sum_b[W] = {};
        if (bias) load(bias + j, bias_a);
        if (bias && GATED) load(bias + width + j, bias_b);
        for (i64 r = blockIdx.y; r < rows; r += gridDim.y) {
            const T *x = x_ + r * full;
            T *dx = dx_ + r * full;
            float a[W], d[W], slope;
            [[maybe_unused]] float b[W];
            load(x + j, a);
            if constexpr (GATED) load(x + width + j, b);
            load(dy + r * width + j, d);
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
            store(dx + j, a);
            if constexpr (GATED) store(dx + width + j, b);
        }
        if (partial) {
            store(partial + blockIdx.y * full + j, sum_a);
            if constexpr (GATED) store(partial + blockIdx.y * full + width + j, sum_b);
        }
    });
}

template <class T, bool GATED>
__global__ void __launch_bounds__(256) activation_fwd(const T *x, const T *bias, T *y, i64 kind, i64 rows, i64 width, i64 vec) {
    if (kind == SILU) forward<T, GATED, SILU>(x, bias, y, rows, width, vec);
    else if (kind == GELU_ERF) forward<T, GATED, GELU_ERF>(x, bias, y, rows, width, vec);
    else if (kind == GELU_TANH) forward<T, GATED, GELU_TANH>(x, bias, y, rows, width, vec);
    else forward<T, GATED, GELU_FAST>(x, bias, y, rows, width, vec);
}

// partial: [gridDim.y][width of x], the column sums of dx per piece of rows, or 0. Without the launch bound on blocks,
// NVRTC spills registers for sm_100.
template <class T, bool GATED>
__global__ void __launch_bounds__(256, GATED ? 2 : 4)
    activation_bwd(const T *x, const T *bias, const T *dy, T *dx, float *partial, i64 kind, i64 rows, i64 width, i64 vec) {
    if (kind == SILU) backward<T, GATED, SILU>(x, bias, dy, dx, partial, rows, width, vec);
    else if (kind == GELU_ERF) backward<T, GATED, GELU_ERF>(x, bias, dy, dx, partial, rows, width, vec);
    else if (kind == GELU_TANH) backward<T, GATED, GELU_TANH>(x, bias, dy, dx, partial, rows, width, vec);
    else backward<T, GATED, GELU_FAST>(x, bias, dy, dx, partial, rows, width, vec);
}

EXPORT(activation_fwd<f32, true>)
EXPORT(activation_fwd<bf16, true>)
EXPORT(activation_fwd<f16, true>)
EXPORT(activation_fwd<f32, false>)
EXPORT(activation_fwd<bf16, false>)
EXPORT(activation_fwd<f16, false>)
EXPORT(activation_bwd<f32, true>)
EXPORT(activation_bwd<bf16, true>)
EXPORT(activation_bwd<f16, true>)
EXPORT(activation_bwd<f32, false>)
EXPORT(activation_bwd<bf16, false>)
EXPORT(activation_bwd<f16, false>)
