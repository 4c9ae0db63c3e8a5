// Mixture of experts: the router, and the permutation of tokens into rows grouped by expert.
//
// Router: one warp per token. Its scores are in shared memory; each of the topk passes finds the best remaining one, by
// (larger value, lower index), and replaces it with NaN, which is never better. Groups that are not chosen become NaN
// before that. The gradient recomputes the probabilities and writes the whole row.
//
// Permutation: row_map [tokens, topk] holds the row of every assignment, or -1. scatter reads a token once and writes its
// rows; gather sums a token's rows in order, so results are bit-equal from run to run; gather_bwd writes the rows'
// gradients and, by a block reduction, those of the probabilities. zero_unused writes the rows that no assignment has.
//
// Memory traffic: scatter reads x and writes topk rows per token, gather the reverse; gather_bwd reads and writes topk
// rows per token.
#include "common.h"

enum { BY_LOGITS = 0, BY_SIGMOID = 1, BY_SOFTMAX = 2 };
enum { OF_CHOSEN = 0, OF_ALL = 1, SIGMOID = 2, SIGMOID_OF_SUM = 3 };

INLINE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
INLINE float not_a_number() { return __int_as_float(0x7fc00000); }

INLINE float warp_sum(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}
INLINE float warp_max(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;
}

// The index of the largest of v[0 .. n), the lowest of equal ones, in every lane; NaNs are skipped (0 if all are NaN).
INLINE int first_largest(const float *v, int n) {
    const int none = 0x7fffffff;
    float best = -INFINITE;
    int at = none;
    for (int i = threadIdx.x; i < n; i += 32)
        if (v[i] > best || (v[i] == best && i < at)) best = v[i], at = i;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, best, distance);
        const int index = __shfl_xor_sync(0xffffffffu, at, distance);
        if (other > best || (other == best && index < at)) best = other, at = index;
    }
    return at == none ? 0 : at;
}

// p[0 .. n) = softmax(x), read by this lane's own elements only.
INLINE void warp_softmax(const float *x, float *p, int n) {
    float top = -INFINITE, sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += 32) top = fmaxf(top, x[i]);
    top = warp_max(top);
    for (int i = threadIdx.x; i < n; i += 32) {
        p[i] = expf(x[i] - top);
        sum += p[i];
    }
    sum = warp_sum(sum);
    for (int i = threadIdx.x; i < n; i += 32) p[i] /= sum;
}

// p [topk]: the unscaled probabilities of the experts `at`; x [experts]: all logits; all [experts]: for OF_ALL, their
// softmax. Returns what the sigmoids were divided by.
INLINE float probabilities(int probability, const float *x, int experts, const i64 *at, int topk, float *all, float *p) {
    if (probability == OF_ALL) {
        warp_softmax(x, all, experts);
        __syncthreads();
        for (int j = threadIdx.x; j < topk; j += 32) p[j] = all[at[j]];
        return 1.0f;
    }
    for (int j = threadIdx.x; j < topk; j += 32) p[j] = x[at[j]];
    if (probability == OF_CHOSEN) {
        warp_softmax(p, p, topk);
        return 1.0f;
    }
    float sum = 0.0f;
    for (int j = threadIdx.x; j < topk; j += 32) {
        p[j] = sigmoid(p[j]);
        sum += p[j];
    }
    if (probability == SIGMOID) return 1.0f;
    sum = warp_sum(sum) + 1e-20f;
    for (int j = threadIdx.x; j < topk; j += 32) p[j] /= sum;
    return sum;
}

// Blocks of one warp; shared memory for 3 experts + groups + topk numbers.
template <class T>
__global__ void __launch_bounds__(32) router_fwd(const T *logits, const float *bias, T *probs, i64 *indices, double scale,
                                                i64 selection, i64 probability, i64 given, i64 rows, i64 experts_, i64 topk_,
                                                i64 groups_, i64 group_topk) {
    DYNAMIC_SHARED(float, memory);
    const int experts = (int)experts_, topk = (int)topk_, groups = (int)groups_;
    float *x = memory, *v = x + experts, *sums = v + 2 * experts, *p = sums + groups;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 *at = indices + row * topk;
        for (int i = threadIdx.x; i < experts; i += 32) v[i] = x[i] = to_float(logits[row * experts + i]);
        if (!given) {
            if (selection == BY_SOFTMAX) warp_softmax(x, v, experts);
            for (int i = threadIdx.x; i < experts; i += 32) {
                if (selection == BY_SIGMOID) v[i] = sigmoid(v[i]);
                if (bias) v[i] += bias[i];
            }
            __syncthreads();
            if (groups) {
                const int size = experts / groups, each = topk / (int)group_topk;
                float *copy = v + experts;
                for (int g = threadIdx.x; g < groups; g += 32) {  // a lane per group: groups have few experts
                    float sum = 0.0f;
                    for (int i = 0; i < size; i++) copy[g * size + i] = v[g * size + i];
                    for (int j = 0; j < each; j++) {
                        int best = -1;
                        for (int i = g * size; i < (g + 1) * size; i++)
                            if (copy[i] == copy[i] && (best < 0 || copy[i] > copy[best])) best = i;
                        if (best >= 0) {
                            sum += copy[best];
                            copy[best] = not_a_number();
                        }
                    }
                    sums[g] = sum;
                    for (int i = 0; i < size; i++) copy[g * size + i] = not_a_number();
                }
                __syncthreads();
                for (int j = 0; j < (int)group_topk; j++) {
                    const int g = first_largest(sums, groups);
                    for (int i = threadIdx.x; i < size; i += 32) copy[g * size + i] = v[g * size + i];
                    __syncthreads();
                    if (threadIdx.x == 0) sums[g] = not_a_number();
                    __syncthreads();
                }
                for (int i = threadIdx.x; i < experts; i += 32) v[i] = copy[i];
                __syncthreads();
            }
            for (int j = 0; j < topk; j++) {
                const int best = first_largest(v, experts);
                __syncthreads();
                if (threadIdx.x == 0) {
                    v[best] = not_a_number();
                    at[j] = best;
                }
                __syncthreads();
            }
        }
        __syncthreads();
        probabilities((int)probability, x, experts, at, topk, v, p);
        for (int j = threadIdx.x; j < topk; j += 32) from_float(p[j] * (float)scale, probs[row * topk + j]);
        __syncthreads();
    }
}

// Shared memory for 2 experts + 2 topk numbers.
template <class T>
__global__ void __launch_bounds__(32) router_bwd(const T *logits, const i64 *indices, const T *dprobs, T *dlogits,
                                                double scale, i64 probability, i64 rows, i64 experts_, i64 topk_) {
    DYNAMIC_SHARED(float, memory);
    const int experts = (int)experts_, topk = (int)topk_;
    float *x = memory, *all = x + experts, *p = all + experts, *g = p + topk;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const i64 *at = indices + row * topk;
        for (int i = threadIdx.x; i < experts; i += 32) x[i] = to_float(logits[row * experts + i]);
        __syncthreads();
        const float sum = probabilities((int)probability, x, experts, at, topk, all, p);
        float dot = 0.0f;
        for (int j = threadIdx.x; j < topk; j += 32) {
            g[j] = to_float(dprobs[row * topk + j]) * (float)scale;
            dot += p[j] * g[j];
        }
        dot = warp_sum(dot);
        __syncthreads();
        for (int i = threadIdx.x; i < experts; i += 32) x[i] = probability == OF_ALL ? -all[i] * dot : 0.0f;
        __syncthreads();
        for (int j = threadIdx.x; j < topk; j += 32) {  // the experts of a token are different
            const float s = probability == SIGMOID_OF_SUM ? p[j] * sum : p[j];
            if (probability == OF_ALL) x[at[j]] += p[j] * g[j];
            else if (probability == OF_CHOSEN) x[at[j]] += p[j] * (g[j] - dot);
            else if (probability == SIGMOID) x[at[j]] += g[j] * s * (1.0f - s);
            else x[at[j]] += (g[j] - dot) / sum * s * (1.0f - s);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < experts; i += 32) from_float(x[i], dlogits[row * experts + i]);
        __syncthreads();
    }
}

// One block per token.
template <class T>
__global__ void __launch_bounds__(256) moe_scatter(const T *x, const i64 *row_map, T *out, i64 tokens, i64 topk, i64 h,
                                                   i64 vec) {
    for (i64 t = blockIdx.x; t < tokens; t += gridDim.x)
        walk<Lanes<T>::count>(vec ? 0 : (int)h, (int)h, [&](int c, auto w) {
            float v[decltype(w)::count];
            load(x + t * h + c, v);
            for (i64 j = 0; j < topk; j++) {
                const i64 row = row_map[t * topk + j];
                if (row >= 0) store(out + row * h + c, v);
            }
        });
}

// used [rows]: 0 for a row that no assignment has.
template <class T>
__global__ void __launch_bounds__(256) zero_unused(const i64 *used, T *out, i64 rows, i64 h) {
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        if (used[row]) continue;
        for (i64 c = threadIdx.x; c < h; c += blockDim.x) from_float(0.0f, out[row * h + c]);
    }
}

// probs [tokens, topk] or 0 for 1.
template <class T>
__global__ void __launch_bounds__(256) moe_gather(const T *rows, const i64 *row_map, const float *probs, T *out, i64 tokens,
                                                  i64 topk, i64 h, i64 vec) {
    for (i64 t = blockIdx.x; t < tokens; t += gridDim.x)
        walk<Lanes<T>::count>(vec ? 0 : (int)h, (int)h, [&](int c, auto w) {
            constexpr int W = decltype(w)::count;
            float sum[W] = {}, v[W];
            for (i64 j = 0; j < topk; j++) {
                const i64 row = row_map[t * topk + j];
                if (row < 0) continue;
                const float p = probs ? probs[t * topk + j] : 1.0f;
                load(rows + row * h + c, v);
#pragma unroll
                for (int i = 0; i < W; i++) sum[i] += p * v[i];
            }
            store(out + t * h + c, sum);
        });
}

// dprobs: float, or 0 (not computed).
template <class T>
__global__ void __launch_bounds__(256) moe_gather_bwd(const T *rows, const i64 *row_map, const float *probs, const T *dout,
                                                      T *drows, float *dprobs, i64 tokens, i64 topk, i64 h, i64 vec) {
    for (i64 t = blockIdx.x; t < tokens; t += gridDim.x)
        for (i64 j = 0; j < topk; j++) {
            const i64 row = row_map[t * topk + j];
            const float p = probs ? probs[t * topk + j] : 1.0f;
            Floats<1> dot = {};
            if (row >= 0)
                walk<Lanes<T>::count>(vec ? 0 : (int)h, (int)h, [&](int c, auto w) {
                    constexpr int W = decltype(w)::count;
                    float d[W], v[W];
                    load(dout + t * h + c, d);
                    if (dprobs) {
                        load(rows + row * h + c, v);
#pragma unroll
                        for (int i = 0; i < W; i++) dot.v[0] += d[i] * v[i];
                    }
#pragma unroll
                    for (int i = 0; i < W; i++) d[i] *= p;
                    store(drows + row * h + c, d);
                });
            if (!dprobs) continue;
            dot = block_reduce(dot, Add<1>());
            if (threadIdx.x == 0) dprobs[t * topk + j] = dot.v[0];
        }
}

// y [rows, h] = silu(a) b probs for x = [a, b].
template <class T>
__global__ void __launch_bounds__(256) weighted_swiglu_fwd(const T *x, const float *probs, T *y, i64 rows, i64 h, i64 vec) {
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const float p = probs[row];
        walk<Lanes<T>::count>(vec ? 0 : (int)h, (int)h, [&](int c, auto w) {
            constexpr int W = decltype(w)::count;
            float a[W], b[W];
            load(x + 2 * row * h + c, a);
            load(x + (2 * row + 1) * h + c, b);
#pragma unroll
            for (int i = 0; i < W; i++) a[i] *= sigmoid(a[i]) * b[i] * p;
            store(y + row * h + c, a);
        });
    }
}

template <class T>
__global__ void __launch_bounds__(256) weighted_swiglu_bwd(const T *x, const float *probs, const T *dy, T *dx, float *dprobs,
                                                           i64 rows, i64 h, i64 vec) {
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const float p = probs[row];
        Floats<1> dot = {};
        walk<Lanes<T>::count>(vec ? 0 : (int)h, (int)h, [&](int c, auto w) {
            constexpr int W = decltype(w)::count;
            float a[W], b[W], d[W];
            load(x + 2 * row * h + c, a);
            load(x + (2 * row + 1) * h + c, b);
            load(dy + row * h + c, d);
#pragma unroll
            for (int i = 0; i < W; i++) {
                const float s = sigmoid(a[i]), silu = a[i] * s;
                dot.v[0] += d[i] * silu * b[i];
                a[i] = p * d[i] * b[i] * s * (1.0f + a[i] * (1.0f - s));
                b[i] = p * d[i] * silu;
            }
            store(dx + 2 * row * h + c, a);
            store(dx + (2 * row + 1) * h + c, b);
        });
        dot = block_reduce(dot, Add<1>());
        if (threadIdx.x == 0) dprobs[row] = dot.v[0];
    }
}

EXPORT(router_fwd<f32>)
EXPORT(router_fwd<bf16>)
EXPORT(router_fwd<f16>)
EXPORT(router_bwd<f32>)
EXPORT(router_bwd<bf16>)
EXPORT(router_bwd<f16>)
EXPORT(moe_scatter<f32>)
EXPORT(moe_scatter<bf16>)
EXPORT(moe_scatter<f16>)
EXPORT(zero_unused<f32>)
EXPORT(zero_unused<bf16>)
EXPORT(zero_unused<f16>)
EXPORT(moe_gather<f32>)
EXPORT(moe_gather<bf16>)
EXPORT(moe_gather<f16>)
EXPORT(moe_gather_bwd<f32>)
EXPORT(moe_gather_bwd<bf16>)
EXPORT(moe_gather_bwd<f16>)
EXPORT(weighted_swiglu_fwd<f32>)
EXPORT(weighted_swiglu_fwd<bf16>)
EXPORT(weighted_swiglu_fwd<f16>)
EXPORT(weighted_swiglu_bwd<f32>)
EXPORT(weighted_swiglu_bwd<bf16>)
EXPORT(weighted_swiglu_bwd<f16>)
