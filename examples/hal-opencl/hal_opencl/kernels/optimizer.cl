// adamw, l2norm and unscale_and_check; one launch per tensor, a group takes CHUNK consecutive elements.
//
// Memory traffic: adamw reads p, g, m, v and writes p, m, v (and the model's copy); unscale reads and writes its
// gradients; sum_of_squares reads once.

#define CHUNK_BEGIN ((long)get_group_id(0) * CHUNK)
#define CHUNK_END(size) min((long)(get_group_id(0) + 1) * CHUNK, size)

// Loshchilov and Hutter, arXiv 1711.05101, algorithm 2. c1, c2: the bias corrections 1 - beta^step. model may be
// missing.
kernel void adamw(OUT(f32, p), IN(T, g), OUT(f32, m), OUT(f32, v), OUT(R, model), const float decay, const float rate,
                  const float beta1, const float one_beta1, const float beta2, const float one_beta2, const float c2,
                  const float eps, const float grad_scale, const long size) {
    global f32 *p_ = TENSOR(p), *m_ = TENSOR(m), *v_ = TENSOR(v);
    global const T *g_ = TENSOR(g);
    global R *model = TENSOR(model);
    FOR_COLUMNS(c, n, CHUNK_BEGIN, CHUNK_END(size)) {
        const vec g = LOAD_N(T, g_ + c, n) * grad_scale;
        const vec m = LOAD_N(f32, m_ + c, n) * beta1 + g * one_beta1;
        const vec v = LOAD_N(f32, v_ + c, n) * beta2 + g * g * one_beta2;
        const vec p = LOAD_N(f32, p_ + c, n) * decay - rate * m / (sqrt(v / c2) + eps);
        STORE_N(f32, m_ + c, m, n);
        STORE_N(f32, v_ + c, v, n);
        STORE_N(f32, p_ + c, p, n);
        if (model) STORE_N(R, model + c, p, n);
    }
}

// partial[group] = the sum of squares of the group's chunk.
kernel void sum_of_squares(IN(T, x), OUT(f32, partial), const long size) {
    LOCAL_SCRATCH
    global const T *x = TENSOR(x);
    vec sum = 0;
    FOR_COLUMNS(c, n, CHUNK_BEGIN, CHUNK_END(size)) {
        const vec v = LOAD_N(T, x + c, n);
        sum += v * v;
    }
    const float total = group_sum(lanes_sum(sum));
    if (get_local_id(0) == 0) TENSOR(partial)[get_group_id(0)] = total;
}

// norm = sqrt(sum of partial), by one work-item with Kahan summation, so that small terms after large ones are not
// lost.
kernel void root_of_sum(IN(f32, partial), OUT(f32, norm), const long count) {
    if (get_local_id(0) != 0) return;
    global const f32 *partial = TENSOR(partial);
    float sum = 0, lost = 0;
    for (long i = 0; i < count; i++) {
        const float y = partial[i] - lost, t = sum + y;
        lost = isfinite(t) ? (t - sum) - y : 0;
        sum = t;
    }
    *TENSOR(norm) = sqrt(sum);
}

// x *= factor; found, initially 0, becomes 1 if a product (in x's type) is not finite. All writers store the same
// value.
kernel void unscale(OUT(T, x), OUT(int, found), const float factor, const long size) {
    global T *x = TENSOR(x);
    int bad = 0;
    FOR_COLUMNS(c, n, CHUNK_BEGIN, CHUNK_END(size)) {
        STORE_N(T, x + c, LOAD_N(T, x + c, n) * factor, n);
        bad |= ANY(!isfinite(LOAD_N(T, x + c, n)));
    }
    if (bad) atomic_or(TENSOR(found), as_int(1.0f));
}
