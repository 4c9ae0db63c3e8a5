// The router of a mixture of experts: the topk largest scores of every row, in order, and their probabilities.
//
// Rows are short and there are many of them, so they are computed ACROSS rows at a time, one per lane, from a transposed
// copy of their logits. The largest are kept in sorted lists, which every value passes through: where it is larger than
// an entry it takes its place, and the entry goes on. That is a fixed number of vector instructions per value and entry,
// without a branch that depends on values. Where there are many of both (above FEW), or experts in groups, each row is
// read on its own instead: a value enters the list only if it is larger than the last entry, so that most values cost one
// comparison. In both, a value moves an entry only if it is larger, so of equal scores the lowest expert wins. Experts
// outside of the chosen groups are NaN, which is never larger. Only what the call needs is exponentiated: the chosen
// experts, or all of them for a softmax over all. The gradient recomputes the probabilities.
//
// Memory traffic: reads the logits once per pass, and writes probs and indices or dlogits.
#ifndef HAL_BODY
#include "common.h"

#include "moe_router_api.h"

enum { BY_LOGITS, BY_SIGMOID, BY_SOFTMAX };
enum { OF_CHOSEN, OF_ALL, SIGMOID, SIGMOID_OF_SUM };
enum { ACROSS = 32, FEW = 1024 };  // rows at a time; values times entries of a list
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

// x [experts][ACROSS] = the logits of `rows` rows; lanes without a row repeat the last one.
HAL_INLINE void NAME(load_across)(const T *logits, int64_t rows, int64_t experts, real *x) {
    for (int64_t l = 0; l < ACROSS; l++) {
        const T *row = logits + (l < rows ? l : rows - 1) * experts;
        for (int64_t i = 0; i < experts; i++) x[i * ACROSS + l] = LOAD(row + i);
    }
}

// best and at [count][ACROSS]: as `largest`, for each lane of v [n][ACROSS]. Empty entries are NaN, and an entry that
// has to move takes the place of the next one without a comparison, so that equal values keep their order.
HAL_INLINE void NAME(largest_across)(const real *v, int64_t n, int64_t count, real *best, int32_t *at) {
    for (int64_t i = 0; i < count * ACROSS; i++) best[i] = NAN, at[i] = 0;
    for (int64_t i = 0; i < n; i++) {
        real value[ACROSS];
        int32_t index[ACROSS], moved[ACROSS];
#pragma omp simd
        for (int l = 0; l < ACROSS; l++) value[l] = v[i * ACROSS + l], index[l] = (int32_t)i, moved[l] = 0;
        for (int64_t j = 0; j < count; j++) {
            real *entry = best + j * ACROSS;
            int32_t *expert = at + j * ACROSS;
#pragma omp simd
            for (int l = 0; l < ACROSS; l++) {
                const real x = value[l], old = entry[l];
                const int32_t e = index[l], before = expert[l];
                const int32_t moves = moved[l] | (!(old >= x) & (x == x));
                entry[l] = moves ? x : old;
                expert[l] = moves ? e : before;
                value[l] = moves ? old : x;
                index[l] = moves ? before : e;
                moved[l] = moves;
            }
        }
    }
}

// p = softmax(x) of n values in each lane, both [n][ACROSS]. p may be x.
HAL_INLINE void NAME(softmax_across)(const real *x, real *p, int64_t n) {
    real top[ACROSS], sum[ACROSS];
#pragma omp simd
    for (int l = 0; l < ACROSS; l++) top[l] = x[l], sum[l] = 0;
    for (int64_t i = 1; i < n; i++)
#pragma omp simd
        for (int l = 0; l < ACROSS; l++) top[l] = x[i * ACROSS + l] > top[l] ? x[i * ACROSS + l] : top[l];
    for (int64_t i = 0; i < n; i++)
#pragma omp simd
        for (int l = 0; l < ACROSS; l++) {
            const real e = RNAME(exp)(x[i * ACROSS + l] - top[l]);
            p[i * ACROSS + l] = e;
            sum[l] += e;
        }
    for (int64_t i = 0; i < n; i++)
#pragma omp simd
        for (int l = 0; l < ACROSS; l++) p[i * ACROSS + l] /= sum[l];
}

// The unscaled probabilities p [topk][ACROSS] of the experts `at` of `rows` rows, and what sigmoids were divided by
// [ACROSS]. all [experts][ACROSS] is the softmax of all logits if the probabilities are of it, else unused.
HAL_INLINE void NAME(probabilities)(int probability, const T *logits, int64_t rows, int64_t experts, const int64_t *at,
                                    int64_t topk, real *all, real *p, real *divisor) {
    if (probability == OF_ALL) {
        NAME(load_across)(logits, rows, experts, all);
        NAME(softmax_across)(all, all, experts);
    }
    for (int64_t l = 0; l < ACROSS; l++) {
        const int64_t row = l < rows ? l : rows - 1;
        for (int64_t j = 0; j < topk; j++) {
            const int64_t e = at[row * topk + j];
            p[j * ACROSS + l] = probability == OF_ALL ? all[e * ACROSS + l] : LOAD(logits + row * experts + e);
        }
    }
    if (probability == OF_ALL) return;
    if (probability == OF_CHOSEN) {
        NAME(softmax_across)(p, p, topk);
        return;
    }
#pragma omp simd
    for (int l = 0; l < ACROSS; l++) divisor[l] = 0;
    for (int64_t j = 0; j < topk; j++)
#pragma omp simd
        for (int l = 0; l < ACROSS; l++) {
            const real s = NAME(sigmoid)(p[j * ACROSS + l]);
            p[j * ACROSS + l] = s;
            divisor[l] += s;
        }
#pragma omp simd
    for (int l = 0; l < ACROSS; l++) divisor[l] = probability == SIGMOID ? 1 : divisor[l] + (real)SMALLEST_SUM;
    for (int64_t j = 0; j < topk; j++)
#pragma omp simd
        for (int l = 0; l < ACROSS; l++) p[j * ACROSS + l] /= divisor[l];
}

// The experts `chosen` [topk] of one row, whose logits are x. v [experts], sums [groups], best and at are scratch.
HAL_INLINE void NAME(choose)(int selection, const real *x, const real *bias, int64_t experts, int64_t topk, int64_t groups,
                             int64_t group_topk, int64_t *chosen, real *v, real *sums, real *best, int64_t *at) {
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

// The experts `chosen` [rows][topk] of at most ACROSS rows without groups. x [experts][ACROSS], best and at
// [topk][ACROSS] are scratch.
HAL_INLINE void NAME(choose_across)(int selection, const T *logits, const real *bias, int64_t rows, int64_t experts,
                                    int64_t topk, int64_t *chosen, real *x, real *best, int32_t *at) {
    NAME(load_across)(logits, rows, experts, x);
    for (int64_t i = 0; selection == BY_SIGMOID && i < experts; i++) {
        const real b = bias ? bias[i] : 0;
#pragma omp simd
        for (int l = 0; l < ACROSS; l++) x[i * ACROSS + l] = NAME(sigmoid)(x[i * ACROSS + l]) + b;
    }
    // The constants let the compiler keep short lists in registers.
    if (topk == 1) NAME(largest_across)(x, experts, 1, best, at);
    else if (topk == 2) NAME(largest_across)(x, experts, 2, best, at);
    else NAME(largest_across)(x, experts, topk, best, at);
    for (int64_t l = 0; l < rows; l++)
        for (int64_t j = 0; j < topk; j++) chosen[l * topk + j] = at[j * ACROSS + l];
}

static void NAME(router_fwd)(int selection, int probability, uintptr_t logits_, uintptr_t bias_, int given,
                             uintptr_t probs_, uintptr_t indices_, int64_t rows, int64_t experts, int64_t topk,
                             int64_t groups, int64_t group_topk, double scale_) {
    const T *logits = (const T *)logits_;
    const real *bias = (const real *)bias_, scale = (real)scale_;
    T *probs = (T *)probs_;
    int64_t *indices = (int64_t *)indices_;
    const int across = !groups && experts * topk <= FEW;
#pragma omp parallel if (rows * experts >= HAL_PARALLEL_MIN / 4)
    {
        real *all = hal_scratch((size_t)((experts + topk + 1) * ACROSS) * sizeof(real) +
                                (size_t)(4 * experts) * sizeof(real) + (size_t)experts * sizeof(int64_t) +
                                (size_t)(topk * ACROSS) * sizeof(int32_t));
        real *p = all + experts * ACROSS, *divisor = p + topk * ACROSS;
        real *x = divisor + ACROSS, *v = x + experts, *sums = v + experts, *best = sums + experts;
        int64_t *at = (int64_t *)(best + experts);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < rows; first += ACROSS) {
            const int64_t count = first + ACROSS < rows ? ACROSS : rows - first;
            const T *from = logits + first * experts;
            int64_t *chosen = indices + first * topk;
            if (!given && across)
                NAME(choose_across)(selection, from, bias, count, experts, topk, chosen, all, p, (int32_t *)(at + experts));
            for (int64_t l = 0; !given && !across && l < count; l++) {
#pragma omp simd
                for (int64_t i = 0; i < experts; i++) x[i] = LOAD(from + l * experts + i);
                NAME(choose)(selection, x, bias, experts, topk, groups, group_topk, chosen + l * topk, v, sums, best, at);
            }
            NAME(probabilities)(probability, from, count, experts, chosen, topk, all, p, divisor);
            for (int64_t l = 0; l < count; l++)
                for (int64_t j = 0; j < topk; j++) STORE(probs + (first + l) * topk + j, p[j * ACROSS + l] * scale);
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
        real *all = hal_scratch((size_t)((experts + 2 * topk + 2) * ACROSS + experts) * sizeof(real));
        real *p = all + experts * ACROSS, *g = p + topk * ACROSS, *dot = g + topk * ACROSS, *divisor = dot + ACROSS;
        real *sum = divisor + ACROSS;  // of one row; zero but for the chosen experts, unless the gradient is of all
        for (int64_t i = 0; i < experts; i++) sum[i] = 0;
#pragma omp for schedule(static)
        for (int64_t first = 0; first < rows; first += ACROSS) {
            const int64_t count = first + ACROSS < rows ? ACROSS : rows - first;
            const int64_t *at = indices + first * topk;
            NAME(probabilities)(probability, logits + first * experts, count, experts, at, topk, all, p, divisor);
            for (int64_t l = 0; l < ACROSS; l++)
                for (int64_t j = 0; j < topk; j++)
                    g[j * ACROSS + l] = LOAD(dprobs + (first + (l < count ? l : count - 1)) * topk + j) * scale;
#pragma omp simd
            for (int l = 0; l < ACROSS; l++) dot[l] = 0;
            for (int64_t j = 0; j < topk; j++)
#pragma omp simd
                for (int l = 0; l < ACROSS; l++) dot[l] += p[j * ACROSS + l] * g[j * ACROSS + l];
            // g becomes the gradient of the chosen logits.
            for (int64_t j = 0; j < topk; j++)
#pragma omp simd
                for (int l = 0; l < ACROSS; l++) {
                    const real q = p[j * ACROSS + l], d = g[j * ACROSS + l];
                    const real s = probability == SIGMOID_OF_SUM ? q * divisor[l] : q;  // the sigmoid itself
                    g[j * ACROSS + l] = probability == OF_ALL         ? q * d
                                        : probability == OF_CHOSEN    ? q * (d - dot[l])
                                        : probability == SIGMOID      ? d * s * (1 - s)
                                                                      : (d - dot[l]) / divisor[l] * s * (1 - s);
                }
            for (int64_t l = 0; l < count; l++) {
                T *to = dlogits + (first + l) * experts;
                if (probability == OF_ALL)
                    for (int64_t i = 0; i < experts; i++) sum[i] = -all[i * ACROSS + l] * dot[l];
                for (int64_t j = 0; j < topk; j++) sum[at[l * topk + j]] += g[j * ACROSS + l];
#pragma omp simd
                for (int64_t i = 0; i < experts; i++) STORE(to + i, sum[i]);
                for (int64_t j = 0; j < topk; j++) sum[at[l * topk + j]] = 0;
            }
        }
    }
}

#endif
