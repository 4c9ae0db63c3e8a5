// Layer norm and RMS norm (layer norm without mean and bias) over rows, forward and backward.
//
// Forward, one block per row. A row of at most four vectors per thread stays in registers (norm_fwd_held): its mean, then
// its squared differences from it, then y = (x - mean) rstd w + b, with w and b fetched before the first reduction. A
// longer row, or one that is not on a 16-byte boundary, is read twice, the second time from L1: a pass for count, mean and
// sum of squared differences (Welford, merged by Chan's rule, without cancellation), and a pass that writes y.
//
// Backward, with n = (x - mean) rstd and g = dy w: dx = rstd (g - mean(g) - n mean(g n)), dw = sum over rows of dy n,
// db = sum over rows of dy. A block takes every gridDim-th row. A thread handles the same columns in every row and is the
// only one to access their sums of dw and db, so neither barriers nor atomics are needed. column_sum (reduce.cu) adds the
// sums of the blocks in order. Rows that fit stay in registers, as do the sums (norm_bwd_held), and the next row is
// fetched while one is processed, so that few blocks suffice and few sums are written. Otherwise the sums are kept in
// shared memory, or in `partial` if they do not fit, which then costs more traffic than the rows.
//
// Memory traffic: forward reads x, writes y; backward reads x and dy, writes dx; the second passes come from L1 or L2.
#include "common.h"

// {count, mean, sum of squared differences from the mean}
struct Moments {
    INLINE void operator()(Floats<3> &a, const Floats<3> &b) const {
        const float count = a.v[0] + b.v[0];
        if (count == 0.0f) return;
        const float share = b.v[0] / count, delta = b.v[1] - a.v[1];
        a.v[1] += delta * share;
        a.v[2] += b.v[2] + delta * delta * a.v[0] * share;
        a.v[0] = count;
    }
};

template <int W> INLINE Floats<3> moments_of(const float (&v)[W]) {
    float mean = 0.0f, square = 0.0f;
#pragma unroll
    for (int i = 0; i < W; i++) mean += v[i];
    mean /= (float)W;
#pragma unroll
    for (int i = 0; i < W; i++) square += (v[i] - mean) * (v[i] - mean);
    return {{(float)W, mean, square}};
}

template <class T, class P, bool CENTERED>
__global__ void __launch_bounds__(256, sizeof(P) > sizeof(T) ? 3 : 4)
    norm_fwd(const T *x_, const P *weight, const P *bias, T *y_, float *means, float *rstds, double eps, i64 rows, i64 width_,
             i64 vec) {
    const int width = (int)width_;
    constexpr int V = Lanes<T>::count;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *x = x_ + row * width;
        T *y = y_ + row * width;
        const int head = vec ? 0 : width;
        const auto fetch_x = [&](int j, auto w) { return fetch<decltype(w)::count>(x + j); };
        float mean = 0.0f, variance;
        if constexpr (CENTERED) {
            Floats<3> all = {};
            walk<V, 4>(head, width, fetch_x, [&](int, const auto &held, auto w) {
                float v[decltype(w)::count];
                floats(held, v);
                Moments()(all, moments_of(v));
            });
            all = block_reduce(all, Moments());
            mean = all.v[1];
            variance = all.v[2] / (float)width;
        } else {
            Floats<1> square = {};
            walk<V, 4>(head, width, fetch_x, [&](int, const auto &held, auto w) {
                constexpr int W = decltype(w)::count;
                float v[W];
                floats(held, v);
#pragma unroll
                for (int i = 0; i < W; i++) square.v[0] += v[i] * v[i];
            });
            variance = block_reduce(square, Add<1>()).v[0] / (float)width;
        }
        const float rstd = 1.0f / sqrtf(variance + (float)eps);
        if (threadIdx.x == 0) {
            if (CENTERED) means[row] = mean;
            rstds[row] = rstd;
        }
        const auto fetch_both = [&](int j, auto w) {
            constexpr int W = decltype(w)::count;
            return Pair<Raw<T, W>, Raw<P, W>>{fetch<W>(x + j), fetch<W>(weight + j)};
        };
        walk<V, 2>(head, width, fetch_both, [&](int j, const auto &held, auto w) {
            constexpr int W = decltype(w)::count;
            float v[W], wt[W], b[W] = {};
            floats(held.a, v);
            floats(held.b, wt);
            if constexpr (CENTERED) load(bias + j, b);
#pragma unroll
            for (int i = 0; i < W; i++) v[i] = (v[i] - mean) * rstd * wt[i] + b[i];
            store(y + j, v);
        });
    }
}

// For rows of at most HELD vectors per thread, with vectors throughout.
template <class T, class P, bool CENTERED>
__global__ void __launch_bounds__(256, 3)
    norm_fwd_held(const T *x, const P *weight, const P *bias, T *y, float *means, float *rstds, double eps, i64 rows,
                  i64 width_) {
    constexpr int V = Lanes<T>::count, HELD = 4;
    constexpr bool AHEAD = sizeof(P) == sizeof(T);  // wider parameters would take too many registers
    const int width = (int)width_, vectors = width / V;
    Raw<P, V> weights[HELD];
    [[maybe_unused]] Raw<P, V> biases[HELD];
    const auto parameters = [&](int u, int j) {
        weights[u] = fetch<V>(weight + j);
        if constexpr (CENTERED) biases[u] = fetch<V>(bias + j);
    };
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        Raw<T, V> held[HELD];
        own<V, HELD>(vectors, [&](int u, int j) { held[u] = fetch<V>(x + row * width + j); });
        if constexpr (AHEAD) own<V, HELD>(vectors, parameters);
        float mean = 0.0f;
        if constexpr (CENTERED) {
            Floats<1> sum = {};
            own<V, HELD>(vectors, [&](int u, int) {
                float v[V];
                floats(held[u], v);
#pragma unroll
                for (int i = 0; i < V; i++) sum.v[0] += v[i];
            });
            mean = block_reduce(sum, Add<1>()).v[0] / (float)width;
        }
        Floats<1> square = {};
        own<V, HELD>(vectors, [&](int u, int) {
            float v[V];
            floats(held[u], v);
#pragma unroll
            for (int i = 0; i < V; i++) square.v[0] += (v[i] - mean) * (v[i] - mean);
        });
        const float variance = block_reduce(square, Add<1>()).v[0] / (float)width;
        const float rstd = 1.0f / sqrtf(variance + (float)eps);
        if (threadIdx.x == 0) {
            if (CENTERED) means[row] = mean;
            rstds[row] = rstd;
        }
        own<V, HELD>(vectors, [&](int u, int j) {
            if constexpr (!AHEAD) parameters(u, j);
            float v[V], w[V], b[V] = {};
            floats(held[u], v);
            floats(weights[u], w);
            if constexpr (CENTERED) floats(biases[u], b);
#pragma unroll
            for (int i = 0; i < V; i++) v[i] = (v[i] - mean) * rstd * w[i] + b[i];
            store(y + row * width + j, v);
        });
    }
}

// partial: [gridDim.x][1 or 2][width]. in_shared: whether the block's sums fit into its dynamic shared memory. norm.py
// launches four blocks per multiprocessor; with the registers of four at once, NVRTC spills.
template <class T, class P, bool CENTERED>
__global__ void __launch_bounds__(256, 3)
    norm_bwd(const T *x_, const P *weight, const float *means, const float *rstds, const T *dy_, T *dx_, float *partial,
             i64 rows, i64 width_, i64 vec, i64 in_shared) {
    DYNAMIC_SHARED(float, shared_sums);
    const int width = (int)width_;
    constexpr int V = Lanes<T>::count;
    float *mine = partial + (i64)blockIdx.x * (CENTERED ? 2 : 1) * width;
    float *dw = in_shared ? shared_sums : mine, *db = dw + width;
    const int head = vec ? 0 : width;
    const auto zero = [&](int j, auto w) {
        const float none[decltype(w)::count] = {};
        store(dw + j, none);
        if constexpr (CENTERED) store(db + j, none);
    };
    walk<V>(head, width, zero);
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *x = x_ + row * width, *dy = dy_ + row * width;
        T *dx = dx_ + row * width;
        const float mean = CENTERED ? means[row] : 0.0f, rstd = rstds[row];
        Floats<2> sums = {};  // of g, and of g n
        const auto fetch_both = [&](int j, auto w) {
            constexpr int W = decltype(w)::count;
            return Pair<Raw<T, W>, Raw<T, W>>{fetch<W>(x + j), fetch<W>(dy + j)};
        };
        walk<V, 2>(head, width, fetch_both, [&](int j, const auto &held, auto w) {
            constexpr int W = decltype(w)::count;
            float v[W], d[W], wt[W];
            floats(held.a, v);
            floats(held.b, d);
            load(weight + j, wt);
#pragma unroll
            for (int i = 0; i < W; i++) {
                const float g = d[i] * wt[i];
                if (CENTERED) sums.v[0] += g;
                sums.v[1] += g * (v[i] - mean) * rstd;
            }
        });
        sums = block_reduce(sums, Add<2>());
        const float g_mean = sums.v[0] / (float)width, gn_mean = sums.v[1] / (float)width;
        walk<V, 2>(head, width, fetch_both, [&](int j, const auto &held, auto w) {
            constexpr int W = decltype(w)::count;
            float v[W], d[W], wt[W], dws[W];
            [[maybe_unused]] float dbs[W];
            floats(held.a, v);
            floats(held.b, d);
            load(weight + j, wt);
            load(dw + j, dws);
            if constexpr (CENTERED) load(db + j, dbs);
#pragma unroll
            for (int i = 0; i < W; i++) {
                const float n = (v[i] - mean) * rstd;
                dws[i] += d[i] * n;
                if constexpr (CENTERED) dbs[i] += d[i];
                v[i] = rstd * (d[i] * wt[i] - g_mean - n * gn_mean);
            }
            store(dx + j, v);
            store(dw + j, dws);
            if constexpr (CENTERED) store(db + j, dbs);
        });
    }
    if (in_shared)
        walk<V>(head, width, [&](int j, auto w) {
            float sum[decltype(w)::count];
            load(dw + j, sum);
            store(mine + j, sum);
            if constexpr (CENTERED) {
                load(db + j, sum);
                store(mine + width + j, sum);
            }
        });
}

// For rows of at most HELD vectors per thread, with vectors throughout. partial: as above.
template <class T, class P, bool CENTERED, int HELD>
__global__ void __launch_bounds__(256, HELD == 2 ? 2 : 1)
    norm_bwd_held(const T *x, const P *weight, const float *means, const float *rstds, const T *dy, T *dx, float *partial,
                  i64 rows, i64 width_) {
    constexpr int V = Lanes<T>::count;
    const int width = (int)width_, vectors = width / V;
    Raw<P, V> weights[HELD];
    own<V, HELD>(vectors, [&](int u, int j) { weights[u] = fetch<V>(weight + j); });
    float dw[HELD][V] = {};
    [[maybe_unused]] float db[HELD][V] = {};
    Raw<T, V> next_x[HELD], next_dy[HELD];
    float next_mean = 0.0f, next_rstd = 0.0f;
    const auto fetch_row = [&](i64 row) {
        own<V, HELD>(vectors, [&](int u, int j) {
            next_x[u] = fetch<V>(x + row * width + j);
            next_dy[u] = fetch<V>(dy + row * width + j);
        });
        if constexpr (CENTERED) next_mean = means[row];
        next_rstd = rstds[row];
    };
    if (blockIdx.x < rows) fetch_row(blockIdx.x);
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        Raw<T, V> held_x[HELD], held_dy[HELD];
#pragma unroll
        for (int u = 0; u < HELD; u++) held_x[u] = next_x[u], held_dy[u] = next_dy[u];
        const float mean = next_mean, rstd = next_rstd;
        if (row + gridDim.x < rows) fetch_row(row + gridDim.x);
        Floats<2> sums = {};  // of g, and of g n
        own<V, HELD>(vectors, [&](int u, int) {
            float v[V], d[V], w[V];
            floats(held_x[u], v);
            floats(held_dy[u], d);
            floats(weights[u], w);
#pragma unroll
            for (int i = 0; i < V; i++) {
                const float n = (v[i] - mean) * rstd, g = d[i] * w[i];
                if (CENTERED) sums.v[0] += g;
                sums.v[1] += g * n;
                dw[u][i] += d[i] * n;
                if constexpr (CENTERED) db[u][i] += d[i];
            }
        });
        sums = block_reduce(sums, Add<2>());
        const float g_mean = sums.v[0] / (float)width, gn_mean = sums.v[1] / (float)width;
        own<V, HELD>(vectors, [&](int u, int j) {
            float v[V], d[V], w[V];
            floats(held_x[u], v);
            floats(held_dy[u], d);
            floats(weights[u], w);
#pragma unroll
            for (int i = 0; i < V; i++) v[i] = rstd * (d[i] * w[i] - g_mean - (v[i] - mean) * rstd * gn_mean);
            store(dx + row * width + j, v);
        });
    }
    float *mine = partial + (i64)blockIdx.x * (CENTERED ? 2 : 1) * width;
    own<V, HELD>(vectors, [&](int u, int j) {
        store(mine + j, dw[u]);
        if constexpr (CENTERED) store(mine + width + j, db[u]);
    });
}

EXPORT(norm_fwd<f32, f32, true>)
EXPORT(norm_fwd<bf16, bf16, true>)
EXPORT(norm_fwd<bf16, f32, true>)
EXPORT(norm_fwd<f16, f16, true>)
EXPORT(norm_fwd<f16, f32, true>)
EXPORT(norm_fwd<f32, f32, false>)
EXPORT(norm_fwd<bf16, bf16, false>)
EXPORT(norm_fwd<bf16, f32, false>)
EXPORT(norm_fwd<f16, f16, false>)
EXPORT(norm_fwd<f16, f32, false>)
EXPORT(norm_bwd<f32, f32, true>)
EXPORT(norm_bwd<bf16, bf16, true>)
EXPORT(norm_bwd<bf16, f32, true>)
EXPORT(norm_bwd<f16, f16, true>)
EXPORT(norm_bwd<f16, f32, true>)
EXPORT(norm_bwd<f32, f32, false>)
EXPORT(norm_bwd<bf16, bf16, false>)
EXPORT(norm_bwd<bf16, f32, false>)
EXPORT(norm_bwd<f16, f16, false>)
EXPORT(norm_bwd<f16, f32, false>)
EXPORT(norm_fwd_held<f32, f32, true>)
EXPORT(norm_fwd_held<bf16, bf16, true>)
EXPORT(norm_fwd_held<bf16, f32, true>)
EXPORT(norm_fwd_held<f16, f16, true>)
EXPORT(norm_fwd_held<f16, f32, true>)
EXPORT(norm_fwd_held<f32, f32, false>)
EXPORT(norm_fwd_held<bf16, bf16, false>)
EXPORT(norm_fwd_held<bf16, f32, false>)
EXPORT(norm_fwd_held<f16, f16, false>)
EXPORT(norm_fwd_held<f16, f32, false>)
EXPORT(norm_bwd_held<f32, f32, true, 2>)
EXPORT(norm_bwd_held<bf16, bf16, true, 2>)
EXPORT(norm_bwd_held<bf16, f32, true, 2>)
EXPORT(norm_bwd_held<f16, f16, true, 2>)
EXPORT(norm_bwd_held<f16, f32, true, 2>)
EXPORT(norm_bwd_held<f32, f32, false, 2>)
EXPORT(norm_bwd_held<bf16, bf16, false, 2>)
EXPORT(norm_bwd_held<bf16, f32, false, 2>)
EXPORT(norm_bwd_held<f16, f16, false, 2>)
EXPORT(norm_bwd_held<f16, f32, false, 2>)
EXPORT(norm_bwd_held<f32, f32, true, 4>)
EXPORT(norm_bwd_held<bf16, bf16, true, 4>)
EXPORT(norm_bwd_held<bf16, f32, true, 4>)
EXPORT(norm_bwd_held<f16, f16, true, 4>)
EXPORT(norm_bwd_held<f16, f32, true, 4>)
EXPORT(norm_bwd_held<f32, f32, false, 4>)
EXPORT(norm_bwd_held<bf16, bf16, false, 4>)
EXPORT(norm_bwd_held<bf16, f32, false, 4>)
EXPORT(norm_bwd_held<f16, f16, false, 4>)
EXPORT(norm_bwd_held<f16, f32, false, 4>)
