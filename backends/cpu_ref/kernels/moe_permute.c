// Permutation of tokens into rows grouped by expert, and back.
//
// The plan is a counting sort of the assignments (t tokens x k experts); it is stable, so an expert's rows are in the
// order of tokens. All other kernels go through the tokens in order, split over threads, with the rows of each from the
// plan's map: x is read once and every row is written once, and each sum has a fixed order. Large results are written
// with non-temporal stores. Rows of experts are all over memory, where every page begins with a page walk and the latency
// of memory, so what the next token needs is prefetched: while a cache line of a token's sum is formed from its rows, the
// same lines of the next token's rows are on their way.
//
// Memory traffic: scatter reads x and writes k rows per token; gather reads k rows and writes one; its gradient reads
// and writes k rows per token.
#ifndef HAL_BODY
#include "common.h"

#include "moe_permute_api.h"

enum { TOGETHER = 4, PAGE = 4096 };  // rows that are added at a time, bytes

#define HAL_SELF "moe_permute.c"
#include "dtypes.h"

int64_t hal_moe_plan(uintptr_t indices_, uintptr_t row_map_, uintptr_t sizes_, int64_t assignments, int64_t experts,
                     int64_t capacity) {
    const int64_t *indices = (const int64_t *)indices_;
    int64_t *row_map = (int64_t *)row_map_, *sizes = (int64_t *)sizes_, filled = 0;
    int64_t *next = hal_scratch((size_t)experts * sizeof(int64_t));
    memset(sizes, 0, (size_t)experts * sizeof(int64_t));
    for (int64_t i = 0; i < assignments; i++) {
        if (indices[i] < -1 || indices[i] >= experts) return -1;
        if (indices[i] >= 0) sizes[indices[i]]++;
    }
    for (int64_t e = 0; e < experts; e++) {
        if (capacity >= 0 && sizes[e] > capacity) sizes[e] = capacity;
        next[e] = capacity >= 0 ? e * capacity : filled;
        filled += sizes[e];
    }
    for (int64_t i = 0; i < assignments; i++) {
        const int64_t e = indices[i];
        row_map[i] = e < 0 || (capacity >= 0 && next[e] == (e + 1) * capacity) ? -1 : next[e]++;
    }
    return filled;
}

int hal_moe_map_fits(uintptr_t row_map_, int64_t assignments, int64_t rows) {
    const int64_t *row_map = (const int64_t *)row_map_;
    int64_t top = -1;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < assignments; i++) top = row_map[i] > top ? row_map[i] : top;
    return top < rows;
}

void hal_moe_scatter(uintptr_t x_, uintptr_t row_map_, uintptr_t out_, int64_t tokens, int64_t topk, int64_t rows,
                     int64_t bytes) {
    const char *x = (const char *)x_;
    const int64_t *row_map = (const int64_t *)row_map_;
    char *out = (char *)out_;
    const int stream = streams(out_, rows * bytes, bytes) != STREAM_NOT;
#pragma omp parallel if (rows * bytes >= HAL_PARALLEL_MIN * 4)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t j = 0; j < topk; j++) {
                const int64_t row = row_map[t * topk + j], next = t + 1 < tokens ? row_map[(t + 1) * topk + j] : -1;
                // One line per page, for the page walk: the others are written without being read.
                if (stream && next >= 0)
                    for (int64_t at = 0; at < bytes; at += PAGE) __builtin_prefetch(out + next * bytes + at, 1, 2);
                if (row < 0) continue;
                if (stream) stream_copy(out + row * bytes, x + t * bytes, bytes);
                else memcpy(out + row * bytes, x + t * bytes, (size_t)bytes);
            }
        if (stream) stream_end();
    }
}

void hal_moe_zero_rest(uintptr_t out_, uintptr_t sizes_, int64_t experts, int64_t capacity, int64_t filled, int64_t rows,
                       int64_t bytes) {
    char *out = (char *)out_;
    const int64_t *sizes = (const int64_t *)sizes_;
    if (capacity < 0) {
        memset(out + filled * bytes, 0, (size_t)((rows - filled) * bytes));
        return;
    }
#pragma omp parallel for schedule(static) if (rows * bytes >= HAL_PARALLEL_MIN * 4)
    for (int64_t e = 0; e < experts; e++)
        memset(out + (e * capacity + sizes[e]) * bytes, 0, (size_t)((capacity - sizes[e]) * bytes));
}

void hal_moe_gather(int dtype, uintptr_t rows, uintptr_t row_map, uintptr_t probs, uintptr_t out, int64_t tokens,
                    int64_t topk, int64_t h) {
    HAL_DISPATCH(dtype, gather, rows, row_map, probs, out, tokens, topk, h);
}

void hal_moe_gather_bwd(int dtype, uintptr_t rows, uintptr_t row_map, uintptr_t probs, uintptr_t dout, uintptr_t drows,
                        uintptr_t dprobs, int64_t tokens, int64_t topk, int64_t row_count, int64_t h) {
    HAL_DISPATCH(dtype, gather_bwd, rows, row_map, probs, dout, drows, dprobs, tokens, topk, row_count, h);
}

#else

// The rows [<= topk] and probabilities of one token's assignments that were not dropped. Returns their number.
HAL_INLINE int64_t NAME(rows_of)(const T *rows, const int64_t *map, const real *probs, int64_t topk, int64_t h,
                                 const T **row, real *p) {
    int64_t n = 0;
    for (int64_t j = 0; j < topk; j++) {
        if (map[j] < 0) continue;
        row[n] = rows + map[j] * h;
        p[n++] = probs ? probs[j] : 1;
    }
    return n;
}

// sum[l] += p[0] row[0][at + l] + ... + p[n - 1] row[n - 1][at + l] in this order, for l < count. n and count should be
// constants, so that the sums stay in registers.
HAL_INLINE void NAME(add_rows)(int n, const T *const *row, const real *p, int64_t at, int count, real *sum) {
#pragma omp simd
    for (int l = 0; l < count; l++) {
        real of_all = sum[l];
#pragma GCC unroll 4
        for (int i = 0; i < n; i++) of_all += p[i] * LOAD(row[i] + at + l);
        sum[l] = of_all;
    }
}

// The sum of n rows at the channels at ... at + count - 1.
HAL_INLINE void NAME(sum_rows)(int64_t n, const T *const *row, const real *p, int64_t at, int count, real *sum) {
    for (int l = 0; l < count; l++) sum[l] = 0;
    int64_t i = 0;
    for (; i + TOGETHER <= n; i += TOGETHER) NAME(add_rows)(TOGETHER, row + i, p + i, at, count, sum);
    if (n - i == 3) NAME(add_rows)(3, row + i, p + i, at, count, sum);
    else if (n - i == 2) NAME(add_rows)(2, row + i, p + i, at, count, sum);
    else if (n - i == 1) NAME(add_rows)(1, row + i, p + i, at, count, sum);
}

static void NAME(gather)(uintptr_t rows_, uintptr_t row_map_, uintptr_t probs_, uintptr_t out_, int64_t tokens,
                         int64_t topk, int64_t h) {
    enum { LINE = 64 / sizeof(T) };
    const T *rows = (const T *)rows_;
    const int64_t *row_map = (const int64_t *)row_map_;
    const real *probs = (const real *)probs_;
    T *out = (T *)out_;
    const int64_t row_bytes = h * (int64_t)sizeof(T);
    const int stream = streams(out_, tokens * row_bytes, row_bytes) == STREAM_LINES;
#pragma omp parallel if (tokens * topk * h >= HAL_PARALLEL_MIN)
    {
        const T **row = hal_scratch((size_t)(2 * topk) * (sizeof(T *) + sizeof(real))), **next = row + topk;
        real *p = (real *)(next + topk), *next_p = p + topk;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t *map = row_map + t * topk;
            const real *p_of = probs ? probs + t * topk : 0;
            const int64_t n = NAME(rows_of)(rows, map, p_of, topk, h, row, p);
            const int64_t ahead =
                t + 1 < tokens ? NAME(rows_of)(rows, map + topk, p_of ? p_of + topk : 0, topk, h, next, next_p) : 0;
            _Alignas(64) real sum[LINE];
            int64_t at = 0;
            for (; at + LINE <= h; at += LINE) {
                for (int64_t i = 0; i < ahead; i++) __builtin_prefetch(next[i] + at, 0, 2);
                NAME(sum_rows)(n, row, p, at, LINE, sum);
                NAME(store_line)(stream, out + t * h + at, sum);
            }
            NAME(sum_rows)(n, row, p, at, (int)(h - at), sum);
            for (int64_t l = 0; at + l < h; l++) STORE(out + t * h + at + l, sum[l]);
        }
        if (stream) stream_end();
    }
}

static void NAME(gather_bwd)(uintptr_t rows_, uintptr_t row_map_, uintptr_t probs_, uintptr_t dout_, uintptr_t drows_,
                             uintptr_t dprobs_, int64_t tokens, int64_t topk, int64_t row_count, int64_t h) {
    const T *rows = (const T *)rows_, *dout = (const T *)dout_;
    const int64_t *row_map = (const int64_t *)row_map_;
    const real *probs = (const real *)probs_;
    T *drows = (T *)drows_;
    real *dprobs = (real *)dprobs_;
    const int64_t row_bytes = h * (int64_t)sizeof(T);
    const int stream = streams(drows_, row_count * row_bytes, row_bytes);
#pragma omp parallel if (tokens * topk * h >= HAL_PARALLEL_MIN)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++) {
            const T *dy = dout + t * h;
            for (int64_t j = 0; j < topk; j++) {
                const int64_t row = row_map[t * topk + j];
                if (dprobs) {
                    real dot = 0;
                    if (row >= 0) ROW_SUM(real, dot, h, i, LOAD(dy + i) * LOAD(rows + row * h + i));
                    dprobs[t * topk + j] = dot;
                }
                if (row < 0 || !drows) continue;
                const real p = probs ? probs[t * topk + j] : 1;
                STORE_ROW(stream, drows + row * h, h, i, p * LOAD(dy + i));
            }
        }
        if (stream) stream_end();
    }
}

#endif
