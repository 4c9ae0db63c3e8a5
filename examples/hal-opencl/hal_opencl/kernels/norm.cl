// Layer norm and RMS norm (CENTRED = 0: layer norm without mean and bias) over rows, forward and backward.
//
// Forward, one group per row: mean, then the variance around it, then y = (x - mean) rstd w + b. Backward, with
// n = (x - mean) rstd and g = dy w: dx = rstd (g - mean(g) - n mean(g n)), one group per row; dw = sum of dy n and
// db = sum of dy, by pieces of the rows, see common.h.
//
// T: x, y, dy and dx; W: weight and bias. Memory traffic: forward reads x once from memory and twice from cache, writes
// y; backward reads x and dy twice, writes dx.

// stats: [1 + CENTRED][rows], (mean and) rstd.
kernel void norm_fwd(IN(T, x), IN(W, weight), IN(B, bias), OUT(T, y), OUT(f32, stats), const float eps, const long rows,
                     const long width) {
    LOCAL_SCRATCH
    const long row = get_group_id(0);
    global const T *x = TENSOR(x) + row * width;
    global const W *weight = TENSOR(weight);
    global const B *bias = TENSOR(bias);
    global T *y = TENSOR(y) + row * width;
    global f32 *stats = TENSOR(stats);
    vec sum = 0, square = 0;
    float mean = 0;
    if (CENTRED) {
        FOR_COLUMNS(c, n, 0, width) sum += LOAD_N(T, x + c, n);
        mean = group_sum(lanes_sum(sum)) / width;
    }
    FOR_COLUMNS(c, n, 0, width) {
        const vec d = LOAD_FILL(T, x + c, n, mean) - mean;
        square += d * d;
    }
    const float rstd = 1 / sqrt(group_sum(lanes_sum(square)) / width + eps);
    FOR_COLUMNS(c, n, 0, width) {
        vec v = (LOAD_N(T, x + c, n) - mean) * rstd * LOAD_N(W, weight + c, n);
        if (CENTRED) v += LOAD_N(B, bias + c, n);
        STORE_N(T, y + c, v, n);
    }
    if (get_local_id(0) == 0) {
        if (CENTRED) stats[row] = mean;
        stats[CENTRED * rows + row] = rstd;
    }
}

kernel void norm_bwd(IN(T, x), IN(W, weight), IN(f32, stats), IN(T, dy), OUT(T, dx), const long rows, const long width) {
    LOCAL_SCRATCH
    const long row = get_group_id(0);
    global const T *x = TENSOR(x) + row * width, *dy = TENSOR(dy) + row * width;
    global const W *weight = TENSOR(weight);
    global T *dx = TENSOR(dx) + row * width;
    global const f32 *stats = TENSOR(stats);
    const float mean = CENTRED ? stats[row] : 0, rstd = stats[CENTRED * rows + row];
    vec g_sum = 0, gn_sum = 0;
    FOR_COLUMNS(c, n, 0, width) {
        const vec g = LOAD_N(T, dy + c, n) * LOAD_N(W, weight + c, n);  // 0 beyond the row, so that x - mean does not matter there
        g_sum += g;
        gn_sum += g * (LOAD_N(T, x + c, n) - mean);
    }
    const float g_mean = CENTRED ? group_sum(lanes_sum(g_sum)) / width : 0;
    const float gn_mean = group_sum(lanes_sum(gn_sum)) * rstd / width;
    FOR_COLUMNS(c, n, 0, width) {
        const vec g = LOAD_N(T, dy + c, n) * LOAD_N(W, weight + c, n), normed = (LOAD_N(T, x + c, n) - mean) * rstd;
        STORE_N(T, dx + c, rstd * (g - g_mean - normed * gn_mean), n);
    }
}

// dw, db: [pieces][width], the column sums of each piece of rows.
kernel void norm_bwd_weights(IN(T, x), IN(f32, stats), IN(T, dy), OUT(f32, dw), OUT(f32, db), const long rows,
                             const long width) {
    global const T *x = TENSOR(x), *dy = TENSOR(dy);
    global const f32 *stats = TENSOR(stats);
    global f32 *dw = TENSOR(dw) + get_group_id(1) * width, *db = TENSOR(db);
    if (CENTRED) db += get_group_id(1) * width;
    FOR_PIECE(row, rows) {
        const float mean = CENTRED ? stats[row] : 0, rstd = stats[CENTRED * rows + row];
        FOR_SPAN(c, n, width) {
            const vec d = LOAD_N(T, dy + row * width + c, n);
            ADD_N(dw + c, d * ((LOAD_N(T, x + row * width + c, n) - mean) * rstd), n);
            if (CENTRED) ADD_N(db + c, d, n);
        }
    }
}
