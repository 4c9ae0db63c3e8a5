// Cross entropy of a row of logits z against one class, over a vocabulary that may be a shard of a larger one.
//
// Forward: one pass over the row computes its statistics {maximum, sum of exp(z - maximum), z at the target, sum of z}.
// Ranks exchange only these four numbers per row. cross_entropy_loss turns them into loss and {maximum, log of the
// sum}.
// Backward: dz = (exp(z - maximum - log sum) - s/v - (1 - s) [j = target]) dloss, one pass, no communication. The two
// terms of the log-sum-exp are saved separately: rounding their sum to float32 would cost large logits several digits.
// (Writing dz during the forward pass would save one read of the logits, but add a write and a read of dz, because
// dloss is not known yet.)
//
// Memory traffic: forward reads the logits; backward reads the logits and writes the gradient.
#include "common.h"

// stats: [4][rows]. A target outside [start, start + width) contributes 0.
template <class T>
__global__ void __launch_bounds__(256)
    cross_entropy_stats(const T *z_, const i64 *target, float *stats, i64 rows, i64 width_, i64 start, i64 vec) {
    constexpr int V = Lanes<T>::count;
    const int width = (int)width_;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *z = z_ + row * width;
        Floats<2> top = {{-INFINITE, 0.0f}};
        float sum = 0.0f;
        const auto fetch_z = [&](int j, auto w) { return fetch<decltype(w)::count>(z + j); };
        walk<V, 4>(vec ? head_of(z, width) : width, width, fetch_z, [&](int, const auto &held, auto w) {
            constexpr int W = decltype(w)::count;
            float v[W];
            floats(held, v);
            log_sum_add(top, v);
#pragma unroll
            for (int i = 0; i < W; i++) sum += v[i];
        });
        const Floats<3> all = block_reduce(Floats<3>{{top.v[0], top.v[1], sum}}, LogSumAndSum());
        if (threadIdx.x == 0) {
            const i64 at = target[row] - start;
            stats[row] = all.v[0];
            stats[rows + row] = all.v[1];
            stats[2 * rows + row] = at >= 0 && at < width ? to_float(z[at]) : 0.0f;
            stats[3 * rows + row] = all.v[2];
        }
    }
}

// lse: [2][rows] = {maximum, log of the sum}. classes: size of the full vocabulary.
__global__ void __launch_bounds__(256)
    cross_entropy_loss(const float *stats, float *loss, float *lse, double smoothing_, i64 rows, i64 classes) {
    const float smoothing = (float)smoothing_;
    for (i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x; row < rows; row += (i64)gridDim.x * blockDim.x) {
        const float top = stats[row], log_sum = logf(stats[rows + row]);
        float y = top - stats[2 * rows + row] + log_sum;
        if (smoothing != 0.0f)
            y = (1.0f - smoothing) * y + smoothing * (top - stats[3 * rows + row] / (float)classes + log_sum);
        loss[row] = y;
        lse[row] = top;
        lse[rows + row] = log_sum;
    }
}

template <class T>
__global__ void __launch_bounds__(256)
    cross_entropy_bwd(const T *z_, const i64 *target, const float *lse, const float *dloss, T *dz_, double smoothing_, i64 rows,
                      i64 width_, i64 start, i64 classes, i64 vec) {
    constexpr int V = Lanes<T>::count;
    const int width = (int)width_;
    const float smoothing = (float)smoothing_, everywhere = smoothing / (float)classes, at_target = 1.0f - smoothing;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *z = z_ + row * width;
        T *dz = dz_ + row * width;
        const float top = lse[row], log_sum = lse[rows + row], d = dloss[row];
        const i64 at = target[row] - start;
        const int hit = at >= 0 && at < width ? (int)at : -1;
        const auto fetch_z = [&](int j, auto w) { return fetch<decltype(w)::count>(z + j); };
        walk<V, 4>(vec ? head_of(z, width) : width, width, fetch_z, [&](int j, const auto &held, auto w) {
            constexpr int W = decltype(w)::count;
            float v[W];
            floats(held, v);
#pragma unroll
            for (int i = 0; i < W; i++) {
                const float p = power_of_2((v[i] - top - log_sum) * LOG2_E);
                v[i] = (p - everywhere - (j + i == hit ? at_target : 0.0f)) * d;
            }
            store(dz + j, v);
        });
    }
}

EXPORT(cross_entropy_stats<f32>)
EXPORT(cross_entropy_stats<bf16>)
EXPORT(cross_entropy_stats<f16>)
EXPORT(cross_entropy_loss)
EXPORT(cross_entropy_bwd<f32>)
EXPORT(cross_entropy_bwd<bf16>)
EXPORT(cross_entropy_bwd<f16>)
