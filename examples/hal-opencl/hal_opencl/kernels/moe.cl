// Mixture of experts in its plain form: the router, one work-item per token; the permutation of tokens into rows grouped
// by expert, one group per token; SwiGLU weighted by a probability per row.
//
// row_map [tokens][topk] holds the row of every assignment, or -1. Sums have a fixed order.
//
// Memory traffic: the router reads a token's logits topk times, from cache; scatter reads x once and writes topk rows per
// token, gather the reverse; gather_bwd reads and writes topk rows per token.

#define BY_LOGITS 0
#define BY_SIGMOID 1
#define BY_SOFTMAX 2
#define OF_CHOSEN 0
#define OF_ALL 1
#define SIGMOID 2
#define SIGMOID_OF_SUM 3
#define SMALLEST_SUM 1e-20f

static inline float gate1(float x) { return 1 / (1 + exp(-x)); }

// The index of the largest of v[0 .. n), the first of equal ones; NaNs are skipped (0 if all are NaN).
static inline long first_largest(global const f32 *v, long n) {
    long best = -1;
    for (long i = 0; i < n; i++)
        if (!isnan(v[i]) && (best < 0 || v[i] > v[best])) best = i;
    return max(best, (long)0);
}

// {maximum, sum of exponentials} of n logits, of the chosen ones if `at`.
static inline float2 softmax_terms(global const T *x, global const long *at, long n) {
    float top = -INFINITY, sum = 0;
    for (long i = 0; i < n; i++) top = fmax(top, GET(T, x + (at ? at[i] : i)));
    for (long i = 0; i < n; i++) sum += exp(GET(T, x + (at ? at[i] : i)) - top);
    return (float2)(top, sum);
}

// The values of a token that probability(.., terms) uses.
static inline float2 terms_of(int kind, global const T *x, global const long *at, long experts, long topk) {
    if (kind == OF_CHOSEN) return softmax_terms(x, at, topk);
    if (kind == OF_ALL) return softmax_terms(x, 0, experts);
    float sum = 0;
    for (long j = 0; j < topk; j++) sum += gate1(GET(T, x + at[j]));
    return (float2)(0, kind == SIGMOID ? 1 : sum + SMALLEST_SUM);
}

static inline float probability(int kind, float x, float2 terms) {
    return (kind <= OF_ALL ? exp(x - terms.x) : gate1(x)) / terms.y;
}

// values [rows][2 experts + groups]: scratch. KIND, SELECTION and GIVEN (indices are read) are -D options.
kernel void router_fwd(IN(T, logits), IN(f32, bias), OUT(f32, values), OUT(T, probs), OUT(long, indices), const float scale,
                       const long rows, const long experts, const long topk, const long groups, const long group_topk) {
    const long row = get_global_id(0);
    if (row >= rows) return;
    global const T *x = TENSOR(logits) + row * experts;
    global const f32 *bias = TENSOR(bias);
    global f32 *v = TENSOR(values) + row * (2 * experts + groups), *kept = v + experts, *sums = kept + experts;
    global long *at = TENSOR(indices) + row * topk;
    if (!GIVEN) {
        const float2 all = SELECTION == BY_SOFTMAX ? softmax_terms(x, 0, experts) : (float2)(0, 1);
        for (long i = 0; i < experts; i++) {
            const float value = GET(T, x + i);
            v[i] = SELECTION == BY_LOGITS ? value : SELECTION == BY_SIGMOID ? gate1(value) : exp(value - all.x) / all.y;
            if (bias) v[i] += bias[i];
        }
        if (groups) {
            const long size = experts / groups, each = topk / group_topk;
            for (long g = 0; g < groups; g++) {
                for (long i = 0; i < size; i++) kept[g * size + i] = v[g * size + i];
                float sum = 0;
                for (long j = 0; j < each; j++) {
                    const long best = g * size + first_largest(kept + g * size, size);
                    sum += kept[best];
                    kept[best] = NAN;
                }
                sums[g] = sum;
            }
            for (long i = 0; i < experts; i++) kept[i] = NAN;
            for (long j = 0; j < group_topk; j++) {
                const long g = first_largest(sums, groups);
                for (long i = 0; i < size; i++) kept[g * size + i] = v[g * size + i];
                sums[g] = NAN;
            }
            v = kept;
        }
        for (long j = 0; j < topk; j++) {
            at[j] = first_largest(v, experts);
            v[at[j]] = NAN;
        }
    }
    const float2 terms = terms_of(KIND, x, at, experts, topk);
    for (long j = 0; j < topk; j++)
        PUT(T, TENSOR(probs) + row * topk + j, probability(KIND, GET(T, x + at[j]), terms) * scale);
}

kernel void router_bwd(IN(T, logits), IN(long, indices), IN(T, dprobs), OUT(T, dlogits), const float scale, const long rows,
                       const long experts, const long topk) {
    const long row = get_global_id(0);
    if (row >= rows) return;
    global const T *x = TENSOR(logits) + row * experts, *dp = TENSOR(dprobs) + row * topk;
    global const long *at = TENSOR(indices) + row * topk;
    global T *dx = TENSOR(dlogits) + row * experts;
    const float2 terms = terms_of(KIND, x, at, experts, topk);
    float dot = 0;
    for (long j = 0; j < topk; j++) dot += probability(KIND, GET(T, x + at[j]), terms) * GET(T, dp + j) * scale;
    for (long i = 0; i < experts; i++) {
        float sum = KIND == OF_ALL ? -probability(KIND, GET(T, x + i), terms) * dot : 0;
        for (long j = 0; j < topk; j++) {
            if (at[j] != i) continue;
            const float value = GET(T, x + i), p = probability(KIND, value, terms), g = GET(T, dp + j) * scale, s = gate1(value);
            if (KIND == OF_ALL) sum += p * g;
            else if (KIND == OF_CHOSEN) sum += p * (g - dot);
            else if (KIND == SIGMOID) sum += g * s * (1 - s);
            else sum += (g - dot) / terms.y * s * (1 - s);
        }
        PUT(T, dx + i, sum);
    }
}

// Rows of no assignment are not written.
kernel void scatter(IN(T, x), IN(long, row_map), OUT(T, out), const long topk, const long h) {
    const long t = get_group_id(0);
    global const T *from = TENSOR(x) + t * h;
    for (long j = 0; j < topk; j++) {
        const long row = TENSOR(row_map)[t * topk + j];
        if (row < 0) continue;
        FOR_COLUMNS(c, n, 0, h) STORE_N(T, TENSOR(out) + row * h + c, LOAD_N(T, from + c, n), n);
    }
}

// probs: [tokens][topk], or missing for 1.
kernel void gather(IN(T, rows), IN(long, row_map), IN(f32, probs), OUT(T, out), const long topk, const long h) {
    const long t = get_group_id(0);
    global const T *rows = TENSOR(rows);
    global const long *row_map = TENSOR(row_map) + t * topk;
    global const f32 *probs = TENSOR(probs) ? TENSOR(probs) + t * topk : 0;
    global T *out = TENSOR(out) + t * h;
    FOR_COLUMNS(c, n, 0, h) {
        vec sum = 0;
        for (long j = 0; j < topk; j++)
            if (row_map[j] >= 0) sum += (probs ? probs[j] : 1) * LOAD_N(T, rows + row_map[j] * h + c, n);
        STORE_N(T, out + c, sum, n);
    }
}

kernel void gather_bwd(IN(T, rows), IN(long, row_map), IN(f32, probs), IN(T, dout), OUT(T, drows), OUT(f32, dprobs),
                       const long topk, const long h) {
    LOCAL_SCRATCH
    const long t = get_group_id(0);
    global const T *rows = TENSOR(rows), *dy = TENSOR(dout) + t * h;
    global T *drows = TENSOR(drows);
    global const f32 *probs = TENSOR(probs);
    global f32 *dprobs = TENSOR(dprobs);
    for (long j = 0; j < topk; j++) {
        const long row = TENSOR(row_map)[t * topk + j];
        const float p = probs ? probs[t * topk + j] : 1;
        vec dots = 0;
        if (row >= 0) FOR_COLUMNS(c, n, 0, h) {
            const vec d = LOAD_N(T, dy + c, n);
            dots += d * LOAD_N(T, rows + row * h + c, n);
            STORE_N(T, drows + row * h + c, p * d, n);
        }
        const float dot = group_sum(lanes_sum(dots));
        if (dprobs && get_local_id(0) == 0) dprobs[t * topk + j] = dot;
    }
}

static inline vec gate(vec x) { return 1 / (1 + exp(-x)); }

kernel void weighted_fwd(IN(T, x), IN(f32, probs), OUT(T, y), const long h) {
    const long row = get_group_id(0);
    global const T *a = TENSOR(x) + 2 * row * h;
    const float p = TENSOR(probs)[row];
    FOR_COLUMNS(c, n, 0, h) {
        const vec v = LOAD_N(T, a + c, n);
        STORE_N(T, TENSOR(y) + row * h + c, v * gate(v) * LOAD_N(T, a + h + c, n) * p, n);
    }
}

kernel void weighted_bwd(IN(T, x), IN(f32, probs), IN(T, dy), OUT(T, dx), OUT(f32, dprobs), const long h) {
    LOCAL_SCRATCH
    const long row = get_group_id(0);
    global const T *a = TENSOR(x) + 2 * row * h, *dy = TENSOR(dy) + row * h;
    global T *dx = TENSOR(dx) + 2 * row * h;
    const float p = TENSOR(probs)[row];
    vec dots = 0;
    FOR_COLUMNS(c, n, 0, h) {
        const vec v = LOAD_N(T, a + c, n), b = LOAD_N(T, a + h + c, n), d = LOAD_N(T, dy + c, n), s = gate(v);
        dots += d * v * s * b;
        STORE_N(T, dx + c, p * d * b * s * (1 + v * (1 - s)), n);
        STORE_N(T, dx + h + c, p * d * v * s, n);
    }
    const float dot = group_sum(lanes_sum(dots));
    if (get_local_id(0) == 0) TENSOR(dprobs)[row] = dot;
}
