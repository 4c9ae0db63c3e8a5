// The router of a mixture of experts: the topk largest scores of every row, in order, and their probabilities.
//
// A row's logits are converted to `real` once. The largest are kept in a sorted list while the row is read; a value
// enters it only if it is larger than the last one, so of equal scores the lowest expert wins, and most values cost one
// comparison. Experts outside of the chosen groups are NaN, which is never larger. Only what the call needs is
// exponentiated: the chosen experts, or all of them for a softmax over all. The gradient recomputes the probabilities.
//
// Memory traffic: reads the logits once per pass, and writes probs and indices or dlogits.
#ifndef HAL_BODY
#include "common.h"

#include "moe_router_api.h"

enum { BY_LOGITS, BY_SIGMOID, BY_SOFTMAX };
enum { OF_CHOSEN, OF_ALL, SIGMOID, SIGMOID_OF_SUM };
#define SMALLEST_SUM 1e-20

#define HAL_SELF "moe_router.c"
#include "dtypes.h"

int hal_moe_router_fwd(int dtype, int selection, int probability, uintptr_t logits, uintptr_t bias, int given,
                       uintptr_t probs, uintptr_t indices, int64_t rows, int64_t experts, int64_t topk, int64_t groups,
                       int64_t group_topk, double scale) {
    if (given) {
        const int64_t *at = (const int64_t *)indices;
        for (int64_t i = 0; i < rows * topk; i++)
            if (at[i] < 0 || at[i] >= experts) return 0;
    }
    HAL_DISPATCH(dtype, router_fwd, selection, probability, logits, bias, given, probs, indices, rows, experts, topk, groups,
                 group_topk, scale);
    return 1;
}

void hal_moe_router_bwd(int dtype, int probability, uintptr_t logits, uintptr_t indices, uintptr_t dprobs,
                        uintptr_t dlogits, int64_t rows, int64_t experts, int64_t topk, double scale) {
    HAL_DISPATCH(dtype, router_bwd, probability, logits, indices, dprobs, dlogits, rows, experts, topk, scale);
}

#else

// The count largest of n values, the largest first; of equal ones the first. NaN are passed over: if that leaves too
// few, the rest is index 0.
HAL_INLINE void NAME(largest)(const real *v, int64_t n, int64_t count, real *best, int64_t *at) {
    int64_t held = 0;
    for (int64_t i = 0; i < n; i++) {
        const real value = v[i];
        if (value != value || (held == count && !(value > best[count - 1]))) continue;
        int64_t j = held < count ? held++ : count - 1;
        for (; j > 0 && value > best[j - 1]; j--) best[j] = best[j - 1], at[j] = at[j - 1];
        best[j] = value, at[j] = i;
    }
    for (; held < count; held++) best[held] = 0, at[held] = 0;
}

// p = softmax(x) for n values. p may be x.
HAL_INLINE void NAME(softmax)(const real *x, real *p, int64_t n) {
    real top = -INFINITY, sum = 0;
    for (int64_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        p[i] = RNAME(exp)(x[i] - top);
        sum += p[i];
    }
    const real inverse = 1 / sum;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) p[i] *= inverse;
}

HAL_INLINE real NAME(sigmoid)(real x) { return 1 / (1 + RNAME(exp)(-x)); }

// Leaves NaN in v outside of the group_topk groups with the largest sums of their `each` largest values. sums [groups]
// is scratch; best and at have room for as many values as any of the lists.
HAL_INLINE void NAME(limit_groups)(real *v, int64_t experts, int64_t groups, int64_t group_topk, int64_t each, real *sums,
                                   real *best, int64_t *at) {
    const int64_t size = experts / groups;
    for (int64_t g = 0; g < groups; g++) {
        NAME(largest)(v + g * size, size, each, best, at);
        real sum = 0;
        for (int64_t j = 0; j < each; j++) sum += best[j];
        sums[g] = sum;
    }
    NAME(largest)(sums, groups, group_topk, best, at);
    for (int64_t g = 0; g < groups; g++) {
        int chosen = 0;
        for (int64_t j = 0; j < group_topk; j++) chosen |= at[j] == g;
        if (!chosen)
            for (int64_t i = 0; i < size; i++) v[g * size + i] = NAN;
    }
}

// The unscaled probabilities p [topk] of the experts `at`; x: all logits. Returns what the sigmoids were divided by.
HAL_INLINE real NAME(probabilities)(int probability, const real *x, int64_t experts, const int64_t *at, int64_t topk,
                                    real *all, real *p) {
    if (probability == OF_ALL) {
        NAME(softmax)(x, all, experts);
        for (int64_t j = 0; j < topk; j++) p[j] = all[at[j]];
        return 1;
    }
    for (int64_t j = 0; j < topk; j++) p[j] = x[at[j]];
    if (probability == OF_CHOSEN) {
        NAME(softmax)(p, p, topk);
        return 1;
    }
    real sum = 0;
    for (int64_t j = 0; j < topk; j++) {
        p[j] = NAME(sigmoid)(p[j]);
        sum += p[j];
    }
    if (probability == SIGMOID) return 1;
    sum += (real)SMALLEST_SUM;
    for (int64_t j = 0; j < topk; j++) p[j] /= sum;
    return sum;
}

static void NAME(router_fwd)(int selection, int probability, uintptr_t logits_, uintptr_t bias_, int given,
                             uintptr_t probs_, uintptr_t indices_, int64_t rows, int64_t experts, int64_t topk,
                             int64_t groups, int64_t group_topk, double scale_) {
    const T *logits = (const T *)logits_;
    const real *bias = (const real *)bias_, scale = (real)scale_;
    T *probs = (T *)probs_;
    int64_t *indices = (int64_t *)indices_;
#pragma omp parallel if (rows * experts >= HAL_PARALLEL_MIN / 4)
    {
        real *x = hal_scratch((size_t)(4 * experts) * sizeof(real) + (size_t)experts * sizeof(int64_t));
        real *v = x + experts, *sums = v + experts, *best = sums + experts;
        int64_t *at = (int64_t *)(best + experts);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const T *from = logits + row * experts;
            int64_t *chosen = indices + row * topk;
#pragma omp simd
            for (int64_t i = 0; i < experts; i++) x[i] = LOAD(from + i);
            if (!given) {
                const real *values = x;
                if (selection == BY_SIGMOID || groups) {
                    values = v;
                    if (selection == BY_SOFTMAX) NAME(softmax)(x, v, experts);
                    else if (selection == BY_SIGMOID)
#pragma omp simd
                        for (int64_t i = 0; i < experts; i++) v[i] = NAME(sigmoid)(x[i]);
                    else memcpy(v, x, (size_t)experts * sizeof(real));
                    if (bias)
                        for (int64_t i = 0; i < experts; i++) v[i] += bias[i];
                    if (groups) NAME(limit_groups)(v, experts, groups, group_topk, topk / group_topk, sums, best, at);
                }
                NAME(largest)(values, experts, topk, best, chosen);
            }
            NAME(probabilities)(probability, x, experts, chosen, topk, v, best);
            for (int64_t j = 0; j < topk; j++) STORE(probs + row * topk + j, best[j] * scale);
        }
    }
}

static void NAME(router_bwd)(int probability, uintptr_t logits_, uintptr_t indices_, uintptr_t dprobs_, uintptr_t dlogits_,
                             int64_t rows, int64_t experts, int64_t topk, double scale_) {
    const T *logits = (const T *)logits_, *dprobs = (const T *)dprobs_;
    const int64_t *indices = (const int64_t *)indices_;
    const real scale = (real)scale_;
    T *dlogits = (T *)dlogits_;
#pragma omp parallel if (rows * experts >= HAL_PARALLEL_MIN / 4)
    {
        real *x = hal_scratch((size_t)(4 * experts) * sizeof(real)), *all = x + experts, *p = all + experts,
             *g = p + experts;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const T *from = logits + row * experts;
            T *to = dlogits + row * experts;
            const int64_t *at = indices + row * topk;
#pragma omp simd
            for (int64_t i = 0; i < experts; i++) x[i] = LOAD(from + i);
            const real sum = NAME(probabilities)(probability, x, experts, at, topk, all, p);
            real dot = 0;
            for (int64_t j = 0; j < topk; j++) {
                g[j] = LOAD(dprobs + row * topk + j) * scale;
                dot += p[j] * g[j];
            }
            if (probability == OF_ALL) {
#pragma omp simd
                for (int64_t i = 0; i < experts; i++) x[i] = -all[i] * dot;
            } else {
                memset(x, 0, (size_t)experts * sizeof(real));
            }
            for (int64_t j = 0; j < topk; j++) {
                const real s = probability == SIGMOID_OF_SUM ? p[j] * sum : p[j];  // the sigmoid itself
                if (probability == OF_ALL) x[at[j]] += p[j] * g[j];
                else if (probability == OF_CHOSEN) x[at[j]] += p[j] * (g[j] - dot);
                else if (probability == SIGMOID) x[at[j]] += g[j] * s * (1 - s);
                else x[at[j]] += (g[j] - dot) / sum * s * (1 - s);
            }
#pragma omp simd
            for (int64_t i = 0; i < experts; i++) STORE(to + i, x[i]);
        }
    }
}

#endif
