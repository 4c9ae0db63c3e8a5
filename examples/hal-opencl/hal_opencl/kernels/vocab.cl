// cross_entropy over a vocabulary that may be sharded, and embedding.
//
// cross_entropy: one group per token computes four numbers from its row of logits: the maximum, and relative to it the
// sum of exponentials, the target's logit and the sum of all logits. Ranks exchange only those numbers
// (cross_entropy_rescale converts them to the common maximum). The gradient needs the log-sum-exp of the whole
// vocabulary.
//
// embedding's gradient: a work-item owns LANES columns of the table and goes through all tokens in order: no atomics,
// one order of summation. Memory traffic: forward reads the logits twice (the second time from cache); backward reads
// them once and writes as much.

// The number that a row's statistics are relative to: its maximum, or 0 if every logit of this rank is -inf.
static inline float reference_point(float top) { return top == -INFINITY ? 0 : top; }

// stats: [4][rows].
kernel void cross_entropy_stats(IN(T, logits), IN(long, target), OUT(f32, stats), const long vocab_start, const long rows,
                                const long width) {
    LOCAL_SCRATCH
    const long row = get_group_id(0), at = TENSOR(target)[row] - vocab_start;
    global const T *logits = TENSOR(logits) + row * width;
    global f32 *stats = TENSOR(stats);
    vec tops = -INFINITY, exps = 0, sums = 0;
    FOR_COLUMNS(c, n, 0, width) tops = fmax(tops, LOAD_FILL(T, logits + c, n, -INFINITY));
    const float top = group_max(lanes_max(tops)), zero = reference_point(top);
    FOR_COLUMNS(c, n, 0, width) {
        exps += exp(LOAD_FILL(T, logits + c, n, -INFINITY) - zero);
        sums += LOAD_FILL(T, logits + c, n, zero) - zero;
    }
    const float exp_sum = group_sum(lanes_sum(exps)), sum = group_sum(lanes_sum(sums));
    if (get_local_id(0) == 0) {
        stats[row] = top;
        stats[rows + row] = exp_sum;
        stats[2 * rows + row] = at >= 0 && at < width ? GET(T, logits + at) - zero : 0;
        stats[3 * rows + row] = sum;
    }
}

// Rescales a rank's stats, which are relative to its own maximum, to the maximum of all ranks, which replaces it.
kernel void cross_entropy_rescale(OUT(f32, stats), IN(f32, top), IN(long, target), const long vocab_start, const long rows,
                                  const long width) {
    const long row = get_global_id(0), at = row < rows ? TENSOR(target)[row] - vocab_start : 0;
    if (row >= rows) return;
    global f32 *stats = TENSOR(stats) + row;
    const float shift = reference_point(*stats) - TENSOR(top)[row];
    stats[0] = TENSOR(top)[row];
    stats[rows] *= exp(shift);
    if (at >= 0 && at < width) stats[2 * rows] += shift;
    stats[3 * rows] += shift * width;
}

// loss, and lse [2][rows]: the maximum and the log of the sum of exponentials above it. v: classes of all ranks.
kernel void cross_entropy_loss(IN(f32, stats), OUT(f32, loss), OUT(f32, lse), const float smoothing, const long rows,
                               const long v) {
    const long row = get_global_id(0);
    if (row >= rows) return;
    global const f32 *stats = TENSOR(stats) + row;
    global f32 *lse = TENSOR(lse) + row;
    const float log_sum = log(stats[rows]);
    float result = log_sum - stats[2 * rows];
    if (smoothing != 0) result = (1 - smoothing) * result - smoothing * (stats[3 * rows] / v - log_sum);
    TENSOR(loss)[row] = result;
    lse[0] = stats[0];
    lse[rows] = log_sum;
}

// dlogits = dloss (softmax - (1 - smoothing) [target] - smoothing / v).
kernel void cross_entropy_bwd(IN(T, logits), IN(long, target), IN(f32, lse), IN(f32, dloss), OUT(T, dlogits),
                              const float smoothing, const long vocab_start, const long rows, const long width,
                              const long v) {
    const long row = get_group_id(0), at = TENSOR(target)[row] - vocab_start;
    global const T *logits = TENSOR(logits) + row * width;
    global T *dlogits = TENSOR(dlogits) + row * width;
    const float top = TENSOR(lse)[row], log_sum = TENSOR(lse)[rows + row], d = TENSOR(dloss)[row];
    FOR_COLUMNS(c, n, 0, width) {
        vec p = exp(LOAD_N(T, logits + c, n) - top - log_sum) - smoothing / v;
        if (at >= c && at < c + LANES) {
            float lanes[LANES];
            VSTORE(p, lanes);
            lanes[at - c] -= 1 - smoothing;
            p = VLOAD(lanes);
        }
        STORE_N(T, dlogits + c, p * d, n);
    }
}

// y[t] = weight[ids[t] - vocab_start], 0 where another rank has that row. One group per token.
kernel void embedding_fwd(IN(T, weight), IN(long, ids), OUT(T, y), const long vocab_start, const long rows,
                          const long width) {
    const long t = get_group_id(0), id = TENSOR(ids)[t] - vocab_start;
    global const T *weight = TENSOR(weight) + id * width;
    global T *y = TENSOR(y) + t * width;
    const int here = id >= 0 && id < rows;
    FOR_COLUMNS(c, n, 0, width) STORE_N(T, y + c, here ? LOAD_N(T, weight + c, n) : (vec)0, n);
}

// sums [rows][width] = 0, then += dy[t] at row ids[t] - vocab_start, for t = 0, 1, ...
kernel void embedding_bwd(IN(T, dy), IN(long, ids), OUT(f32, sums), OUT(T, dweight), const long vocab_start,
                          const long tokens, const long rows, const long width) {
    global const T *dy = TENSOR(dy);
    global const long *ids = TENSOR(ids);
    global f32 *sums = TENSOR(sums);
    global T *dweight = TENSOR(dweight);
    const long c = (long)get_global_id(0) * LANES, n = width - c;
    if (n <= 0) return;
    for (long row = 0; row < rows; row++) STORE_N(f32, sums + row * width + c, (vec)0, n);
    for (long t = 0; t < tokens; t++) {
        const long row = ids[t] - vocab_start;
        if (row < 0 || row >= rows) continue;
        global f32 *sum = sums + row * width + c;
        STORE_N(f32, sum, LOAD_N(f32, sum, n) + LOAD_N(T, dy + t * width + c, n), n);
    }
    for (long row = 0; row < rows; row++)
        STORE_N(T, dweight + row * width + c, LOAD_N(f32, sums + row * width + c, n), n);
}
