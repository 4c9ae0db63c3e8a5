// Flash attention, forward and backward, on rows of floats: q [heads][tokens][d], k and v [kv_heads][tokens][d].
//
// A work-item holds a tile of LANES rows, transposed (lane = row), and sweeps over the rows of the other side, STEP at
// a time:
//   forward:   lanes are queries; s = K q, p = exp(s - maximum), o += V^T p, with a running maximum per lane (online softmax,
//              Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135).
//   dq:        lanes are queries; p = exp(s - lse), ds = p (dp - delta), dq += K^T ds; delta = dout . out is left for dk, dv.
//   dk, dv:    lanes are keys; the same with the sides exchanged, over all query heads of the group.
// So every product is a scalar times a vector, nothing is summed across lanes or work-items, and runs are bit-equal.
// The matrix of scores is never formed. A lane sees the sweep's rows [lo, hi], which is all that windows need.
//
// Packed sequences (TND) are rows q0 ... q1 and k0 ... k1 of the tables `sequences` [count][4]; a dense batch is packed
// sequences of one length. HEAD: the largest head size a kernel has private memory for.
#define STEP 8

// Parameters of all kernels here. m*: strides of the mask over (sequence, head, query, key); draw*: of the dropout
// draw.
#define CALL                                                                                                             \
    IN(int, sequences), IN(uchar, mask), const long heads, const long kv_heads, const long q_tokens, const long k_tokens, \
        const long d, const long before, const long after, const long packed, const float scale, const long m0,          \
        const long m1, const long m2, const long m3, const ulong seed, const ulong offset, const long first,             \
        const long draw0, const long draw1, const long draw2, const uint threshold, const float keep_scale

// The work-group's sequence: its rows, and the offset between the indices of keys and queries (d = sk - sq).
#define SEQUENCE                                                                                                         \
    const long sequence = get_group_id(2);                                                                               \
    global const int *bounds = TENSOR(sequences) + 4 * sequence;                                                         \
    const long q0 = bounds[0], sq = bounds[1] - q0, k0 = bounds[2], sk = bounds[3] - k0, ahead = sk - sq;

// Index of a head's query 0 in lse [batch, heads, sq], or [heads, tokens] if packed.
#define LSE(head) (packed ? (head) * q_tokens + q0 : (sequence * heads + (head)) * sq)
// Start of the mask and of the draw of a head, at query 0 and key 0 of the sequence.
#define MASK(head) (TENSOR(mask) ? TENSOR(mask) + sequence * m0 + (head) * m1 : 0)
#define DRAWN(head) ((ulong)(first + (packed ? q0 * draw2 + k0 : sequence * draw0) + (head) * draw1))

// A work-item's tile of queries, of which `lanes` exist, and the keys and values of its head; it ends where none exist.
#define QUERY_TILE                                                                                                       \
    const long lane0 = (long)get_global_id(0) * LANES, lanes = min(sq - lane0, (long)LANES), head = get_group_id(1);     \
    if (lanes <= 0) return;                                                                                              \
    const long at = (head * q_tokens + q0 + lane0) * d, kv = (head / (heads / kv_heads) * k_tokens + k0) * d;            \
    global const f32 *k = TENSOR(k) + kv, *v = TENSOR(v) + kv;                                                           \
    struct tile t = tile_of(lane0, sq, ahead, before, after, sk);                                                        \
    tile_extras(&t, lane0, MASK(head), m2, m3, DRAWN(head), draw2, 1);

struct tile {
    ivec lo, hi;                     // rows of the sweep that a lane sees; lo > hi: none
    long begin, end;                 // rows of the sweep that any lane sees
    global const uchar *mask;        // of lane 0 and row 0; strides of lanes and rows
    long mask_lane, mask_row;
    ulvec drawn;                     // indices of row 0's elements in the draw
    ulong drawn_row;
};

// Lanes are rows lane0 ... of `count`, and lane l sees l + shift - before ... l + shift + after of the sweep's `limit`
// rows.
static struct tile tile_of(long lane0, long count, long shift, long before, long after, long limit) {
    struct tile t;
    int lo[LANES], hi[LANES];
    t.begin = limit, t.end = 0;
    for (int l = 0; l < LANES; l++) {
        const long at = lane0 + l + shift;
        lo[l] = clamp(at - before, (long)0, limit);
        hi[l] = lane0 + l < count ? clamp(at + after, (long)-1, limit - 1) : -1;
        if (lo[l] <= hi[l]) {
            t.begin = min(t.begin, (long)lo[l]);
            t.end = max(t.end, (long)hi[l] + 1);
        }
    }
    t.lo = VLOAD(lo), t.hi = VLOAD(hi);
    return t;
}

static void tile_extras(struct tile *t, long lane0, global const uchar *mask, long mask_lane, long mask_row, ulong drawn,
                        ulong drawn_lane, ulong drawn_row) {
    t->mask = mask ? mask + lane0 * mask_lane : 0;
    t->mask_lane = mask_lane, t->mask_row = mask_row;
    t->drawn = drawn + ((ulong)lane0 + lane_numbers()) * drawn_lane;
    t->drawn_row = drawn_row;
}

// All bits set in the lanes that see row `row` of the sweep.
static inline ivec seen(const struct tile *t, long row, long lanes) {
    ivec see = ((ivec)(int)row >= t->lo) & ((ivec)(int)row <= t->hi);
    if (t->mask) {
        int all[LANES];
        VSTORE(see, all);
        for (int l = 0; l < lanes; l++)
            if (t->mask[l * t->mask_lane + row * t->mask_row]) all[l] = 0;
        see = VLOAD(all);
    }
    return see;
}

// `count` rows of d floats, transposed into columns of LANES; missing rows are 0.
static void transpose(float *to, global const float *rows, long count, long d) {
    for (long e = 0; e < d; e++)
        for (int l = 0; l < LANES; l++) to[e * LANES + l] = l < count ? rows[l * d + e] : 0;
}

// The inverse of transpose, with a factor per lane: rows = factor * columns.
static void write_rows(global float *rows, const float *from, vec factor, long count, long d) {
    for (long e = 0; e < d; e++) {
        float all[LANES];
        VSTORE(VLOAD(from + e * LANES) * factor, all);
        for (int l = 0; l < LANES; l++)
            if (l < count) rows[l * d + e] = all[l];
    }
}

static void clear(float *columns, long d) {
    for (long e = 0; e < d; e++) VSTORE((vec)0, columns + e * LANES);
}

// Row `row` + u of the sweep; beyond the end the last row, which no lane sees at that index.
#define SWEEP_ROW(rows, row, u, end) ((rows) + min((row) + (u), (end) - 1) * d)

// s[u] = (row + u) . lane, for STEP rows. The sums are in a separate array with constant indices only, so that it is
// kept in registers; s is indexed by variables elsewhere.
static inline void dots(vec s[STEP], const float *columns, global const float *rows, long row, long end, long d) {
    global const float *at[STEP];
    vec sum[STEP];
#pragma unroll
    for (int u = 0; u < STEP; u++) at[u] = SWEEP_ROW(rows, row, u, end), sum[u] = 0;
    for (long e = 0; e < d; e++) {
        const vec x = VLOAD(columns + e * LANES);
#pragma unroll
        for (int u = 0; u < STEP; u++) sum[u] = fma((vec)at[u][e], x, sum[u]);
    }
#pragma unroll
    for (int u = 0; u < STEP; u++) s[u] = sum[u];
}

// columns = alpha columns + the sum over u of weight[u] (row + u).
static inline void add_rows(float *columns, vec alpha, const vec weight[STEP], global const float *rows, long row,
                            long end, long d) {
    global const float *at[STEP];
    vec factor[STEP];
#pragma unroll
    for (int u = 0; u < STEP; u++) at[u] = SWEEP_ROW(rows, row, u, end), factor[u] = weight[u];
    for (long e = 0; e < d; e++) {
        vec x = VLOAD(columns + e * LANES) * alpha;
#pragma unroll
        for (int u = 0; u < STEP; u++) x = fma((vec)at[u][e], factor[u], x);
        VSTORE(x, columns + e * LANES);
    }
}

kernel void forward(IN(f32, q), IN(f32, k), IN(f32, v), OUT(f32, out), OUT(f32, lse), CALL) {
    SEQUENCE
    QUERY_TILE
    float query[HEAD * LANES], sum[HEAD * LANES];
    transpose(query, TENSOR(q) + at, lanes, d);
    clear(sum, d);
    vec top = -INFINITY, total = 0;
    for (long row = t.begin; row < t.end; row += STEP) {
        vec s[STEP], now = top;
        dots(s, query, k, row, t.end, d);
#pragma unroll
        for (int u = 0; u < STEP; u++) {
            s[u] = seen(&t, row + u, lanes) ? s[u] * scale : (vec)-INFINITY;
            now = fmax(now, s[u]);
        }
        // A lane without a visible key keeps -inf; subtracting 0 instead makes its exponentials exp(-inf) = 0.
        const vec shift = now == -INFINITY ? (vec)0 : now, alpha = exp(top - shift);
        total *= alpha;
#pragma unroll
        for (int u = 0; u < STEP; u++) {
            s[u] = exp(s[u] - shift);
            total += s[u];
            if (threshold) {
                const uvec bits = philox(seed, offset, t.drawn + (ulong)(row + u) * t.drawn_row);
                s[u] = (bits >> 8) >= threshold ? s[u] * keep_scale : (vec)0;
            }
        }
        top = now;
        add_rows(sum, alpha, s, v, row, t.end, d);
    }
    write_rows(TENSOR(out) + at, sum, total == 0 ? (vec)0 : 1 / total, lanes, d);
    STORE_N(f32, TENSOR(lse) + LSE(head) + lane0, total == 0 ? (vec)-INFINITY : top + log(total), lanes);
}

// Replaces scores s by dropped-out p, and dp by ds, for STEP rows. shift and delta belong to the query, a lane or a
// row.
static inline void gradients(vec s[STEP], vec dp[STEP], const struct tile *t, long row, long lanes, const vec shift[STEP],
                             const vec delta[STEP], float scale, ulong seed, ulong offset, uint threshold,
                             float keep_scale) {
#pragma unroll
    for (int u = 0; u < STEP; u++) {
        const vec p = seen(t, row + u, lanes) ? exp(s[u] * scale - shift[u]) : (vec)0;
        vec kept = p, d = dp[u];
        if (threshold) {
            const uvec bits = philox(seed, offset, t->drawn + (ulong)(row + u) * t->drawn_row);
            kept = (bits >> 8) >= threshold ? p * keep_scale : (vec)0;
            d = (bits >> 8) >= threshold ? d * keep_scale : (vec)0;
        }
        s[u] = kept;
        dp[u] = p * (d - delta[u]) * scale;
    }
}

// Computes dq, and delta [heads][tokens] for backward_kv.
kernel void backward_q(IN(f32, q), IN(f32, k), IN(f32, v), IN(f32, out), IN(f32, lse), IN(f32, dout), OUT(f32, dq),
                       OUT(f32, delta), CALL) {
    SEQUENCE
    QUERY_TILE
    float query[HEAD * LANES], dy[HEAD * LANES], sum[HEAD * LANES];
    transpose(sum, TENSOR(out) + at, lanes, d);
    transpose(dy, TENSOR(dout) + at, lanes, d);
    vec deltas[STEP], shifts[STEP];
    deltas[0] = 0;
    for (long e = 0; e < d; e++) deltas[0] = fma(VLOAD(sum + e * LANES), VLOAD(dy + e * LANES), deltas[0]);
    STORE_N(f32, TENSOR(delta) + head * q_tokens + q0 + lane0, deltas[0], lanes);
    // +inf for a query without a visible key: its probabilities are exp(-inf) = 0.
    shifts[0] = LOAD_FILL(f32, TENSOR(lse) + LSE(head) + lane0, lanes, INFINITY);
    shifts[0] = shifts[0] == -INFINITY ? (vec)INFINITY : shifts[0];
    for (int u = 1; u < STEP; u++) deltas[u] = deltas[0], shifts[u] = shifts[0];
    transpose(query, TENSOR(q) + at, lanes, d);
    clear(sum, d);
    for (long row = t.begin; row < t.end; row += STEP) {
        vec s[STEP], dp[STEP];
        dots(s, query, k, row, t.end, d);
        dots(dp, dy, v, row, t.end, d);
        gradients(s, dp, &t, row, lanes, shifts, deltas, scale, seed, offset, threshold, keep_scale);
        add_rows(sum, 1, dp, k, row, t.end, d);
    }
    write_rows(TENSOR(dq) + at, sum, 1, lanes, d);
}

kernel void backward_kv(IN(f32, q), IN(f32, k), IN(f32, v), IN(f32, lse), IN(f32, dout), IN(f32, delta), OUT(f32, dk),
                        OUT(f32, dv), CALL) {
    SEQUENCE
    const long lane0 = (long)get_global_id(0) * LANES, lanes = min(sk - lane0, (long)LANES), kv_head = get_group_id(1);
    if (lanes <= 0) return;
    const long at = (kv_head * k_tokens + k0 + lane0) * d, group = heads / kv_heads;
    struct tile t = tile_of(lane0, sk, -ahead, after, before, sq);
    float key[HEAD * LANES], value[HEAD * LANES], dkey[HEAD * LANES], dvalue[HEAD * LANES];
    transpose(key, TENSOR(k) + at, lanes, d);
    transpose(value, TENSOR(v) + at, lanes, d);
    clear(dkey, d);
    clear(dvalue, d);
    for (long head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const long queries = head * q_tokens + q0;
        global const f32 *q = TENSOR(q) + queries * d, *dout = TENSOR(dout) + queries * d;
        global const f32 *lse = TENSOR(lse) + LSE(head), *delta = TENSOR(delta) + queries;
        tile_extras(&t, lane0, MASK(head), m3, m2, DRAWN(head), 1, draw2);
        for (long row = t.begin; row < t.end; row += STEP) {
            vec s[STEP], dp[STEP], shifts[STEP], deltas[STEP];
#pragma unroll
            for (int u = 0; u < STEP; u++) {
                const long i = min(row + u, t.end - 1);
                shifts[u] = lse[i] == -INFINITY ? INFINITY : lse[i];
                deltas[u] = delta[i];
            }
            dots(s, key, q, row, t.end, d);
            dots(dp, value, dout, row, t.end, d);
            gradients(s, dp, &t, row, lanes, shifts, deltas, scale, seed, offset, threshold, keep_scale);
            add_rows(dvalue, 1, s, dout, row, t.end, d);
            add_rows(dkey, 1, dp, q, row, t.end, d);
        }
    }
    write_rows(TENSOR(dk) + at, dkey, 1, lanes, d);
    write_rows(TENSOR(dv) + at, dvalue, 1, lanes, d);
}
