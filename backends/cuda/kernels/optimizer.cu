// The optimizer step over lists of tensors: adamw, sum of squares, unscale and check.
//
// Up to LISTED tensors per launch. Their addresses and sizes are kernel parameters (below the limit of 4 KB), so
// nothing is copied to the device and the launch can be captured in a CUDA graph. A block processes one chunk of one
// tensor, found by bisection in the table of first blocks. A tensor whose addresses are not all 16-byte aligned is
// accessed element by element.
//
// Memory traffic: adamw reads p, g, m, v and writes p, m, v (and the model's copy); l2norm reads; unscale reads and
// writes.
#include "common.h"

constexpr int LISTED = 48, CHUNK = 16384;

template <int LISTS> struct Tensors {
    i64 count;
    void *at[LISTS][LISTED];
    i64 size[LISTED], first_block[LISTED];
    INLINE int tensor_of(i64 block) const {
        int low = 0, high = (int)count;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (first_block[middle] <= block) low = middle;
            else high = middle;
        }
        return low;
    }
    INLINE bool aligned(int tensor) const {
        u64 bits = 0;
#pragma unroll
        for (int list = 0; list < LISTS; list++) bits |= (u64)at[list][tensor];
        return bits % 16 == 0;
    }
};

// Runs f(j, Width) over the elements of this block's chunk.
template <int V, int LISTS, class F> INLINE void chunk(const Tensors<LISTS> &tensors, int tensor, F f) {
    const i64 begin = ((i64)blockIdx.x - tensors.first_block[tensor]) * CHUNK, left = tensors.size[tensor] - begin;
    const int n = (int)(left < CHUNK ? left : CHUNK);
    walk<V>(tensors.aligned(tensor) ? 0 : n, n, [&](int j, auto w) { f(begin + j, w); });
}

// The same for use(j, elements, Width) with the elements of one tensor, in groups of four vectors.
template <class T, class F> INLINE void chunk_of(const Tensors<1> &tensors, int tensor, const T *x, F use) {
    const i64 begin = ((i64)blockIdx.x - tensors.first_block[tensor]) * CHUNK, left = tensors.size[tensor] - begin;
    const int n = (int)(left < CHUNK ? left : CHUNK);
    walk<Lanes<T>::count, 4>(
        tensors.aligned(tensor) ? 0 : n, n, [&](int j, auto w) { return fetch<decltype(w)::count>(x + begin + j); },
        [&](int j, const auto &held, auto w) { use(begin + j, held, w); });
}

struct Adam {
    double decay, beta1, beta2, rate, correction, eps, grad_scale;
};

INLINE bool is_finite(float x) { return (__float_as_int(x) & 0x7f800000) != 0x7f800000; }

// Lists: parameters, gradients (G), first and second moments, and low-precision copies (M; null: none). clip_factor
// (null: 1) is a further factor of the gradients; if it is not finite, nothing is written. Every thread reads it: one
// broadcast load per chunk of CHUNK elements.
template <class G, class M>
__global__ void __launch_bounds__(256) adamw(Tensors<5> tensors, Adam adam, const float *clip_factor) {
    const float clip = clip_factor ? *clip_factor : 1.0f;
    if (!is_finite(clip)) return;
    constexpr int V = Lanes<G>::count > Lanes<M>::count ? Lanes<G>::count : Lanes<M>::count;
    const int tensor = tensors.tensor_of(blockIdx.x);
    float *p = (float *)tensors.at[0][tensor], *m = (float *)tensors.at[2][tensor], *v = (float *)tensors.at[3][tensor];
    const G *g = (const G *)tensors.at[1][tensor];
    M *copy = (M *)tensors.at[4][tensor];
    const float decay = (float)adam.decay, beta1 = (float)adam.beta1, beta2 = (float)adam.beta2, rate = (float)adam.rate,
                correction = (float)adam.correction, eps = (float)adam.eps, grad_scale = (float)(adam.grad_scale * clip),
                other1 = (float)(1.0 - adam.beta1), other2 = (float)(1.0 - adam.beta2);
    chunk<V>(tensors, tensor, [&](i64 j, auto w) {
        constexpr int W = decltype(w)::count;
        float ps[W], gs[W], ms[W], vs[W];
        load(p + j, ps);
        load(g + j, gs);
        load(m + j, ms);
        load(v + j, vs);
#pragma unroll
        for (int i = 0; i < W; i++) {
            const float grad = gs[i] * grad_scale;
            ms[i] = ms[i] * beta1 + grad * other1;
            vs[i] = vs[i] * beta2 + grad * grad * other2;
            ps[i] = ps[i] * decay - rate * ms[i] / (sqrtf(vs[i] * correction) + eps);
        }
        store(p + j, ps);
        store(m + j, ms);
        store(v + j, vs);
        if (copy) store(copy + j, ps);
    });
}

// partial[blockIdx.x] = the chunk's sum of squares.
template <class T> __global__ void __launch_bounds__(256) sum_squares(Tensors<1> tensors, float *partial) {
    const int tensor = tensors.tensor_of(blockIdx.x);
    const T *x = (const T *)tensors.at[0][tensor];
    Floats<1> sum = {};
    chunk_of(tensors, tensor, x, [&](i64, const auto &held, auto w) {
        constexpr int W = decltype(w)::count;
        float v[W];
        floats(held, v);
#pragma unroll
        for (int i = 0; i < W; i++) sum.v[0] += v[i] * v[i];
    });
    sum = block_reduce(sum, Add<1>());
    if (threadIdx.x == 0) partial[blockIdx.x] = sum.v[0];
}

// Launched with one block: out = sqrt(sum of partial).
__global__ void __launch_bounds__(256) root_of_sum(const float *partial, float *out, i64 count) {
    double sum = 0.0;
#pragma unroll 8
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) sum += partial[i];
    const Floats<1> all = block_reduce(Floats<1>{{(float)sum}}, Add<1>());
    if (threadIdx.x == 0) *out = sqrtf(all.v[0]);
}

// x *= scale in x's type; sets *found_inf to 1 if a product is not finite.
template <class T> __global__ void __launch_bounds__(256) unscale(Tensors<1> tensors, double scale_, float *found_inf) {
    const int tensor = tensors.tensor_of(blockIdx.x);
    T *x = (T *)tensors.at[0][tensor];
    const float scale = (float)scale_;
    bool bad = false;
    chunk_of(tensors, tensor, x, [&](i64 j, const auto &held, auto w) {
        constexpr int W = decltype(w)::count;
        float v[W];
        floats(held, v);
#pragma unroll
        for (int i = 0; i < W; i++) {
            T rounded;
            from_float(v[i] * scale, rounded);
            v[i] = to_float(rounded);
            bad = bad || !is_finite(v[i]);
        }
        store(x + j, v);
    });
    if (__syncthreads_or(bad) && threadIdx.x == 0) atomicExch(found_inf, 1.0f);
}

EXPORT(adamw<f32, f32>)
EXPORT(adamw<f32, bf16>)
EXPORT(adamw<f32, f16>)
EXPORT(adamw<bf16, f32>)
EXPORT(adamw<bf16, bf16>)
EXPORT(adamw<bf16, f16>)
EXPORT(adamw<f16, f32>)
EXPORT(adamw<f16, bf16>)
EXPORT(adamw<f16, f16>)
EXPORT(sum_squares<f32>)
EXPORT(sum_squares<bf16>)
EXPORT(sum_squares<f16>)
EXPORT(root_of_sum)
EXPORT(unscale<f32>)
EXPORT(unscale<bf16>)
EXPORT(unscale<f16>)
