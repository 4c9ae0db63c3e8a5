// Softmax cross entropy over a (part of a) vocabulary, with label smoothing; rows are split over threads.
//
// Forward: one sweep over a row in blocks of 2048 logits that stay in L1. The block's maximum is computed; if it
// exceeds the running one, the running sum is rescaled; then the block's exponentials are added. No exponential is
// stored: the backward pass recomputes them from the maximum and the sum, in one sweep that writes the gradient.
// Maximum and sum are saved separately, because the log-sum-exp of large logits would lose the digits of the sum.
// For a vocabulary shard, the kernel returns four statistics per row, which the caller combines (maximum first, then
// sums); the backward pass of every shard is then local.
//
// Memory traffic: forward reads the logits once and prefetches two blocks ahead, because a block's exponentials take as
// long as fetching the next block. Backward reads them once, prefetching four pages ahead, and writes the gradient,
// with non-temporal stores unless in place.
// 16-bit logits are converted in registers, never copied.
#ifndef HAL_BODY
#include "common.h"

#include "cross_entropy_api.h"

enum { VOCAB_BLOCK = 2048, GRADIENT_BLOCK = 512, ROWS = 4, AHEAD = 16384 };  // AHEAD in bytes

// Long rows gain nothing from being processed together, and there may be fewer of them than threads: one at a time.
HAL_INLINE int64_t rows_at_once(int64_t v) { return v > VOCAB_BLOCK ? 1 : ROWS; }

#define HAL_SELF "cross_entropy.c"
#ifndef HAL_OTHERS
#define HAL_F32_ONLY
#endif
#include "dtypes.h"

void hal_cross_entropy_stats(int dtype, uintptr_t logits, uintptr_t targets, uintptr_t stats, int smoothing, int64_t rows,
                             int64_t v, int64_t start) {
    HAL_DISPATCH(dtype, cross_entropy_stats, logits, targets, stats, smoothing, rows, v, start);
}

void hal_cross_entropy_fwd(int dtype, uintptr_t logits, uintptr_t targets, uintptr_t loss, uintptr_t sums, double eps,
                           int64_t rows, int64_t v, int64_t start) {
    HAL_DISPATCH(dtype, cross_entropy_fwd, logits, targets, loss, sums, eps, rows, v, start);
}

void hal_cross_entropy_bwd(int dtype, uintptr_t logits, uintptr_t targets, uintptr_t sums, uintptr_t dloss,
                           uintptr_t dlogits, double eps, int64_t rows, int64_t v, int64_t start, int64_t total) {
    HAL_DISPATCH(dtype, cross_entropy_bwd, logits, targets, sums, dloss, dlogits, eps, rows, v, start, total);
}

#else

HAL_INLINE real NAME(block_top)(const T *block, int64_t count, int beyond, real top) {
    ROW_MAX_BEYOND(beyond, top, count, j, LOAD(block + j));
    return top;
}

// For the rows [begin, end), at most ROWS of them: maximum, sum of exp(x - maximum) and, if smoothing, sum of x -
// maximum (a sum of logits far from zero would lose digits). The maxima of the first blocks are computed before
// anything else, so that the horizontal steps of one row overlap with the next row.
HAL_INLINE void NAME(rows_stats)(const T *logits, int64_t begin, int64_t end, int64_t rows, int64_t v, int smoothing,
                                 real *maximum, real *sum_exp, real *sum_x) {
    const int64_t first = v < VOCAB_BLOCK ? v : VOCAB_BLOCK;
    real tops[ROWS];
    for (int64_t row = begin; row < end; row++)
        tops[row - begin] = NAME(block_top)(logits + row * v, first, BEYOND(row * v, first, rows * v), -(real)INFINITY);
    for (int64_t row = begin; row < end; row++) {
        real top = tops[row - begin], sum = 0, total = 0;
        for (int64_t at = 0; at < v; at += VOCAB_BLOCK) {
            const int64_t count = at + VOCAB_BLOCK < v ? VOCAB_BLOCK : v - at;
            const int beyond = BEYOND(row * v + at, count, rows * v);
            const T *block = logits + row * v + at;
            const real block_top = at ? NAME(block_top)(block, count, beyond, top) : top;
            if (block_top > top) {
                sum *= RNAME(exp)(top - block_top);
                if (top > -(real)INFINITY) total += (real)at * (top - block_top);
                top = block_top;
            }
            // Only -inf so far: their exponentials must be 0, not NaN.
            const real shift = top == -(real)INFINITY ? 0 : top;
            real part;
            ROW_SUM_BEYOND(beyond, real, part, count, j, RNAME(low_exp)(LOAD(block + j) - shift),
                           PREFETCH((uintptr_t)(block + j) + 2 * VOCAB_BLOCK * sizeof(T), LANES * sizeof(T), 2));
            sum += part;
            if (smoothing) {
                ROW_SUM_BEYOND(beyond, real, part, count, j, LOAD(block + j) - shift, (void)0);
                total += part;
            }
        }
        maximum[row - begin] = top;
        sum_exp[row - begin] = sum;
        sum_x[row - begin] = total;
    }
}

static void NAME(cross_entropy_stats)(uintptr_t logits, uintptr_t targets_, uintptr_t stats_, int smoothing, int64_t rows,
                                      int64_t v, int64_t start) {
    const int64_t *targets = (const int64_t *)targets_;
    real *stats = (real *)stats_;
    const int64_t step = rows_at_once(v);
#pragma omp parallel for schedule(static) if (rows * v >= HAL_PARALLEL_MIN)
    for (int64_t begin = 0; begin < rows; begin += step) {
        const int64_t end = begin + step < rows ? begin + step : rows;
        real *at = stats + begin;
        NAME(rows_stats)((const T *)logits, begin, end, rows, v, smoothing, at, at + rows, at + 3 * rows);
        for (int64_t row = begin; row < end; row++) {
            const int64_t target = targets[row] - start;
            stats[2 * rows + row] = target >= 0 && target < v ? LOAD((const T *)logits + row * v + target) : 0;
        }
    }
}

// sums: [2][rows] = {maximum, sum of exp(x - maximum)}.
static void NAME(cross_entropy_fwd)(uintptr_t logits, uintptr_t targets_, uintptr_t loss_, uintptr_t sums_, double eps_,
                                    int64_t rows, int64_t v, int64_t start) {
    const int64_t *targets = (const int64_t *)targets_;
    const real eps = (real)eps_;
    real *loss = (real *)loss_, *sums = (real *)sums_;
    const int64_t step = rows_at_once(v);
#pragma omp parallel for schedule(static) if (rows * v >= HAL_PARALLEL_MIN)
    for (int64_t begin = 0; begin < rows; begin += step) {
        const int64_t end = begin + step < rows ? begin + step : rows;
        real totals[ROWS];
        NAME(rows_stats)((const T *)logits, begin, end, rows, v, eps_ != 0, sums + begin, sums + rows + begin, totals);
        for (int64_t row = begin; row < end; row++) {
            const int64_t target = targets[row] - start;
            const real top = sums[row], log_sum = RNAME(log)(sums[rows + row]);
            const real at = target >= 0 && target < v ? LOAD((const T *)logits + row * v + target) : 0;
            // (top - at) is computed first: it is exact or nearly so, whereas top + log_sum would lose the low bits of
            // log_sum.
            loss[row] = (1 - eps) * (top - at + log_sum);
            if (eps_ != 0) loss[row] += eps * (log_sum - totals[row - begin] / (real)v);
        }
    }
}

static void NAME(cross_entropy_bwd)(uintptr_t logits, uintptr_t targets_, uintptr_t sums_, uintptr_t dloss_,
                                    uintptr_t dlogits, double eps, int64_t rows, int64_t v, int64_t start, int64_t total) {
    const int64_t *targets = (const int64_t *)targets_;
    const real *sums = (const real *)sums_, *dloss = (const real *)dloss_;
    const real uniform = (real)(eps / (double)total), hit = (real)(1 - eps);
    const int64_t row_bytes = v * (int64_t)sizeof(T);
    const int stream = dlogits == logits ? STREAM_NOT : streams(dlogits, rows * row_bytes, row_bytes);
#pragma omp parallel if (rows * v >= HAL_PARALLEL_MIN)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const T *x = (const T *)logits + row * v;
            T *dx = (T *)dlogits + row * v;
            const int64_t target = targets[row] - start;
            const real top = sums[row], inverse = 1 / sums[rows + row], upstream = dloss[row];
            const real scale = upstream * inverse, shift = eps == 0 ? 0 : upstream * uniform;
            const int here = target >= 0 && target < v;
            const real at = here ? LOAD(x + target) : 0;  // read before the loop, because dlogits may be logits
            for (int64_t begin = 0; begin < v; begin += GRADIENT_BLOCK) {
                const int64_t count = begin + GRADIENT_BLOCK < v ? GRADIENT_BLOCK : v - begin;
                const int beyond = BEYOND(row * v + begin, count, rows * v);
                const T *block = x + begin;
                PREFETCH((uintptr_t)block + AHEAD, count * (int64_t)sizeof(T), 3);
                STORE_ROW_BEYOND(beyond, stream, dx + begin, count, j, RNAME(low_exp)(LOAD(block + j) - top) * scale - shift);
            }
            if (here) STORE(dx + target, upstream * (RNAME(low_exp)(at - top) * inverse - uniform - hit));
        }
        if (stream) stream_end();
    }
}

#endif
