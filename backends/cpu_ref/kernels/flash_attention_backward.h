// Backward pass of one arithmetic kind: see flash_attention.c for the algorithm.

struct backward_space {
    unit *qt, *dot;         // FA_SWEEP x [units(d)][48] Q^T and [units(e)][48] dO^T
    unit *qp, *dop;         // FA_SWEEP x [ROW][padded d or e] Q and dO as units along the queries
    unit *rows;             // [48][padded] a tile of rows
    real *dq;               // FA_SWEEP x [48][padded d] dQ
    real *s, *dp;           // [96][48] scores, then P; dP, then dS
    real *cap, *db;         // [96][48] derivatives of the softcap; gradients of the bias (NULL where there is none)
    unit *p_rows, *ds_rows; // [96][ROW] P and dS as units along the queries (s and dp themselves for KU = 1)
    unit *ds_pairs;         // [96 / KU][48] dS as units along the keys (dp itself for KU = 1)
    real *buffer;           // rows of out and dO converted to real, where conversion is needed
    unit *k, *v, *kp;       // packed operands of a head: rows of K and V, K in pairs of keys
    real *dk, *dv;          // [capacity][padded d], [capacity][padded e] gradients of a head's keys from key0 on
    int64_t key0, capacity;
    struct bytes_tile *bytes;
};

enum { ROW = (FA_QUERIES / KU + TILE - 1) / TILE * TILE };  // units in a row of queries; zero beyond the last query

// Rounds the vectors of KU keys to units: stores each at a row of its own, as units along the queries, and returns them as
// units along the keys. (One conversion for both, since it takes longer than a multiplication.)
HAL_INLINE uvec store_rows(unit *to, vec even, vec odd) {
#ifdef FA_KIND_BF16
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    *(row_at *)to = (row_at)_mm512_castsi512_si256(both);
    *(row_at *)(to + ROW) = (row_at)_mm512_extracti64x4_epi64(both, 1);
    return interleaved(both);
#else
    store(to, even);
    return (void)odd, even;
#endif
}

// For `count` keys (4, or KU) of one vector of queries, at s and dp: replaces S by keep P and dP by P (keep' dP -
// delta), where keep' is 0 for a probability that dropout drops, else 1 / (1 - p). extra: whether cap or db exists.
HAL_INLINE void gradient(int count, int n, int k, const uint8_t *keep, int extra, real dropout_scale, real c, vec shift,
                         vec delta, const struct backward_space *w) {
    vec p[4], ds[4];
#pragma GCC unroll 4
    for (int u = 0; u < count; u++) {
        const int at = (k + u) * FA_QUERIES + n * W;
        const vec g = load(w->dp + at);
        p[u] = exp2_of(load(w->s + at) * c - shift);
        if (keep) {
            const ivec kept = lanes_of(keep + at);
            ds[u] = p[u] * ((vec)((ivec)(g * dropout_scale) & kept) - delta);
            p[u] = (vec)((ivec)p[u] & kept);
        } else {
            ds[u] = p[u] * (g - delta);
        }
        if (extra && w->db) store(w->db + at, ds[u]);
        if (extra && w->cap) ds[u] *= load(w->cap + at);
    }
#pragma GCC unroll 4
    for (int u = 0; u < count; u += KU) {
        const int row = (k + u) * ROW + n * W / KU;
        store_rows(w->p_rows + row, p[u], p[u + KU - 1]);
        const uvec units = store_rows(w->ds_rows + row, ds[u], ds[u + KU - 1]);
        if (KU == 2) store_units(w->ds_pairs + (k + u) / 2 * FA_QUERIES + n * W, units);
    }
}

HAL_INLINE void gradient_all(int n, int from, int to, const uint8_t *keep, int extra, real dropout_scale, real c, vec shift,
                             vec delta, const struct backward_space *w) {
    int k = from;
    for (; k + 4 <= to; k += 4) gradient(4, n, k, keep, extra, dropout_scale, c, shift, delta, w);
    for (; k < to; k += KU) gradient(KU, n, k, keep, extra, dropout_scale, c, shift, delta, w);
}

static void gradient_columns(const struct tile *t, int v, real c, real dropout_scale, const real *shift, const real *delta,
                             const struct backward_space *w) {
    const int from = t->from[v] * FA_SUB, to = least(t->to[v] * FA_SUB, t->keys);
    for (int n = v * SUB_VECTORS; n < (v + 1) * SUB_VECTORS; n++) {
        const vec lse2 = load(shift + n * W), row = load(delta + n * W);
        if (KU == 2 && to % 2) {
            store(w->s + to * FA_QUERIES + n * W, splat(-(real)INFINITY));
            store(w->dp + to * FA_QUERIES + n * W, splat(0));
            if (w->cap) store(w->cap + to * FA_QUERIES + n * W, splat(0));
        }
        const uint8_t *keep = t->has_keep ? w->bytes->keep[0] : NULL;
        if (w->cap || w->db)
            gradient_all(n, from, to, keep, 1, dropout_scale, c, lse2, row, w);
        else if (keep)
            gradient_all(n, from, to, keep, 0, dropout_scale, c, lse2, row, w);
        else
            gradient_all(n, from, to, NULL, 0, dropout_scale, c, lse2, row, w);
    }
}

// Packs rows i0... of a tensor twice, transposed and in pairs along the rows; zero beyond the last row.
static void pack_tile(const struct fa_call *call, const char *src, int64_t stride, int rows, int64_t d,
                      const struct backward_space *w, unit *transposed, unit *pairs) {
    const struct hal_flash_attention *g = call->shape;
    const int64_t ldr = padded(units(d)), ldp = padded(d), size = element_size(g->dtype);
    unit *along = KU == 1 ? pairs : w->rows;  // the same buffer for KU = 1
    const int64_t used = padded(rows);
    if (KU == 2 && rows == used && d % (KU * PAD) == 0 && stride % (KU * size) == 0) {
        transpose(transposed, FA_QUERIES, (const unit *)src, stride / (KU * size), used, ldr);
    } else {
        pack_rows(along, ldr, src, stride, g->dtype, rows, d);
        memset(along + rows * ldr, 0, (size_t)((used - rows) * ldr) * sizeof(unit));
        transpose(transposed, FA_QUERIES, along, ldr, used, ldr);
    }
    if (KU == 1) return;
    pack_pairs(pairs, ldp, src, stride, g->dtype, rows, d);
    memset(pairs + units(rows) * ldp, 0, (size_t)((ROW - units(rows)) * ldp) * sizeof(unit));
}

// W partial sums of a * b over a row.
#ifdef FA_KIND_BF16
HAL_INLINE vec row_products(const char *a, const char *b, int64_t n) {
    __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t e = 0; e < n; e += 2 * W) {
        const __mmask32 valid = n - e < 2 * W ? ((__mmask32)1 << (n - e)) - 1 : ~(__mmask32)0;
        const __m512i x = _mm512_maskz_loadu_epi16(valid, a + 2 * e), y = _mm512_maskz_loadu_epi16(valid, b + 2 * e);
        sum[e / (2 * W) % 2] = _mm512_dpbf16_ps(sum[e / (2 * W) % 2], (__m512bh)x, (__m512bh)y);
    }
    return sum[0] + sum[1];
}
#else
HAL_INLINE vec row_products(const real *a, const real *b, int64_t n) {
    vec sum[2] = {{0}, {0}};
    int64_t e = 0;
    for (; e + 2 * W <= n; e += 2 * W) {
        sum[0] += load(a + e) * load(b + e);
        sum[1] += load(a + e + W) * load(b + e + W);
    }
    for (; e + W <= n; e += W) sum[0] += load(a + e) * load(b + e);
    for (int l = 0; e < n; e++, l++) sum[1][l] += a[e] * b[e];
    return sum[0] + sum[1];
}
#endif

// delta[q] = sum over channels of dO * out. The partial sums of a row stay in W lanes until those of 48 rows are
// transposed together: adding up lanes row by row doubled the time of this function.
static void row_dots(const struct fa_call *call, const char *out, const char *dout, int rows, real *buffer, real *delta) {
    const struct hal_flash_attention *g = call->shape;
    const char *rest = call->rest ? call->rest + (out - call->out) : NULL;
    const int64_t d = g->value_size, size = element_size(g->dtype);
    real sums[FA_QUERIES * W] __attribute__((aligned(64))), turned[FA_QUERIES * W] __attribute__((aligned(64)));
    for (int q = 0; q < FA_QUERIES; q++) {
        vec sum = {0};
        if (q < rows) {
            const char *a = out + q * g->out[1] * size, *b = dout + q * g->dout[1] * size;
#ifdef FA_KIND_BF16
            (void)buffer;
            sum = row_products(a, b, d);
            if (rest) sum += row_products(rest + q * g->out[1] * size, b, d);
#else
            const real *b_real = as_real(buffer + padded(d), b, g->dtype, d);
            sum = row_products(as_real(buffer, a, g->dtype, d), b_real, d);
            if (rest) sum += row_products(as_real(buffer, rest + q * g->out[1] * size, g->dtype, d), b_real, d);
#endif
        }
        store(sums + q * W, sum);
    }
    transpose((unit *)turned, FA_QUERIES, (const unit *)sums, W, FA_QUERIES, W);
    for (int n = 0; n < FA_QUERIES; n += W) {
        vec sum = {0};
        for (int l = 0; l < W; l++) sum += load(turned + l * FA_QUERIES + n);
        store(delta + n, sum);
    }
}

struct operands {
    struct operand k, v, kp;
};

// A tile of queries during a sweep over the keys.
struct backward_state {
    struct tile t;
    unit *qt, *dot, *qp, *dop;
    real *dq;
    real shift[FA_QUERIES] __attribute__((aligned(64))), delta[FA_QUERIES] __attribute__((aligned(64)));
};

static void backward_open(const struct fa_call *call, const struct fa_sequence *seq, int64_t head, int64_t tile,
                          const struct backward_space *w, struct backward_state *q) {
    const struct hal_flash_attention *g = call->shape;
    const int64_t d = padded(g->head_size), e = padded(g->value_size), bytes = g->value_size * element_size(g->dtype);
    const int64_t size = element_size(g->dtype), which = tile % FA_SWEEP;
    const int64_t i0 = fa_first(seq, tile);
    q->t = (struct tile){.i0 = i0, .rows = (int)fa_rows(seq, tile)};
    q->qt = w->qt + which * d * FA_QUERIES, q->dot = w->dot + which * e * FA_QUERIES;
    q->qp = w->qp + which * d * ROW, q->dop = w->dop + which * e * ROW;
    q->dq = w->dq + which * d * FA_QUERIES;
    const real *lse = lse_of(call, seq, head) + i0;
    for (int i = 0; i < FA_QUERIES; i++) {
        // A query without a visible key has lse = -inf; replacing that by +inf makes all its probabilities 0.
        const int alive = i < q->t.rows && lse[i] != -(real)INFINITY;
        q->shift[i] = alive ? lse[i] * (real)1.4426950408889634 : (real)INFINITY;
        q->delta[i] = 0;
    }
    const char *dout = rows_of(call->dout, g->dout, g->dtype, seq->batch, seq->q0 + i0, head);
    const char *out = rows_of(call->out, g->out, g->dtype, seq->batch, seq->q0 + i0, head);
    fetch_rows(dout, g->dout[1] * size, q->t.rows, bytes);
    fetch_rows(out, g->out[1] * size, q->t.rows, bytes);
    if (call->rest) fetch_rows(call->rest + (out - call->out), g->out[1] * size, q->t.rows, bytes);
    const char *rows = rows_of(call->q, g->q, g->dtype, seq->batch, seq->q0 + i0, head);
    fetch_rows(rows, g->q[1] * size, q->t.rows, g->head_size * size);
    row_dots(call, out, dout, q->t.rows, w->buffer, q->delta);
    pack_tile(call, rows, g->q[1] * size, q->t.rows, g->head_size, w, q->qt, q->qp);
    pack_tile(call, dout, g->dout[1] * size, q->t.rows, g->value_size, w, q->dot, q->dop);
    if (!call->dsinks) return;
    // A sink is a key whose value is 0: dP = 0, so dS = -P delta.
    real *dsinks = (real *)call->dsinks + (lse - (const real *)call->lse);
    const real sink = ((const real *)call->sinks)[head] * (real)LOG2E;
    for (int i = 0; i < q->t.rows; i++) dsinks[i] = -(real)exp2(sink - q->shift[i]) * q->delta[i];
}

// Copies the tile's visible gradients of the bias to dbias, which has an element for each score.
static void write_bias_gradient(const struct fa_call *call, const struct fa_sequence *seq, int64_t head,
                                const struct tile *t, const real *db) {
    const struct hal_flash_attention *g = call->shape;
    real *to = (real *)call->dbias + ((seq->batch * g->heads + head) * g->sq + t->i0) * g->sk + t->k0;
    for (int q = 0; q < t->rows; q++)
        for (int k = t->from[q / FA_SUB] * FA_SUB; k < least(t->to[q / FA_SUB] * FA_SUB, t->keys); k++)
            to[q * g->sk + k] = db[k * FA_QUERIES + q];
}

// Zeroes the queries of a run's rows of units that are not of the run.
static void zero_hidden(const struct run *r, unit *rows) {
    enum { COLUMN = FA_SUB / KU };
    for (int k = r->k_from; k < r->k_to && r->v1 - r->v0 < FA_SUBS; k++) {
        memset(rows + k * ROW, 0, (size_t)(r->v0 * COLUMN) * sizeof(unit));
        memset(rows + k * ROW + r->v1 * COLUMN, 0, (size_t)((FA_SUBS - r->v1) * COLUMN) * sizeof(unit));
    }
}

static void backward_keys(const struct fa_call *call, const struct fa_sequence *seq, int64_t head, int64_t k0,
                          const struct operands *o, const struct backward_space *w, struct backward_state *q,
                          struct ahead *ahead) {
    const struct hal_flash_attention *g = call->shape;
    const struct scaling scale = scaling_of(call);
    const int64_t d = g->head_size, ldp = padded(d), lde = padded(g->value_size);
    const struct adjust a = call->adjusted ? adjust_of(call, seq, head) : (struct adjust){0};
    struct tile *t = &q->t;
    if (!tile_open(t, w->bytes, call, seq, head, k0)) return;
    tile_scores(t, seq, w->bytes, o->k.p, o->k.ld, q->qt, units(d), scale.sign,
                call->adjusted ? &a : NULL, w->s, w->cap);
    ahead_step(ahead);
    FOR_RUNS(t, r) {
        const struct run r = it.r;
        multiply_rows(r.k_to - r.k_from, (r.v1 - r.v0) * SUB_VECTORS, units(g->value_size), o->v.p + (k0 + r.k_from) * o->v.ld, o->v.ld,
                      q->dot + r.v0 * FA_SUB, FA_QUERIES, w->dp + r.k_from * FA_QUERIES + r.v0 * FA_SUB, FA_QUERIES);
    }
    ahead_step(ahead);
    for (int v = 0; v < FA_SUBS; v++) {
        ahead_step(ahead);
        if (t->from[v] < t->to[v]) gradient_columns(t, v, scale.c, (real)g->dropout_scale, q->shift, q->delta, w);
    }
    if (w->db) write_bias_gradient(call, seq, head, t, w->db);
    ahead_step(ahead);
    add_keys(t, seq, d, w->ds_pairs, &o->kp, q->dq, ldp);
    ahead_step(ahead);
    FOR_RUNS(t, r) {
        const struct run r = it.r;
        const int64_t keys = r.k_to - r.k_from, key = k0 + r.k_from;
        // Tiles multiply complete rows.
        if (FA_TILES) zero_hidden(&r, w->p_rows), zero_hidden(&r, w->ds_rows);
        const int64_t line = FA_TILES ? 0 : r.v0 * FA_SUB / KU, queries = FA_TILES ? ROW : (r.v1 - r.v0) * FA_SUB / KU;
        const int64_t at = r.k_from * ROW + line, sum = key - w->key0;
        add_rows(keys, lde / W, queries, w->p_rows + at, ROW, q->dop + line * lde, lde, w->dv + sum * lde, lde);
        add_rows(keys, ldp / W, queries, w->ds_rows + at, ROW, q->qp + line * ldp, ldp, w->dk + sum * ldp, ldp);
    }
}

static void backward_close(const struct fa_call *call, const struct fa_sequence *seq, int64_t head,
                           struct backward_state *q) {
    const struct hal_flash_attention *g = call->shape;
    for (int i = 0; i < FA_QUERIES; i++) q->shift[i] = (real)g->scale;
    char *dq = (char *)rows_of(call->dq, g->dq, g->dtype, seq->batch, seq->q0 + q->t.i0, head);
    close_sums(&q->t, q->dq, padded(g->head_size));
    write_tile(dq, NULL, g->dq[1] * element_size(g->dtype), g->dtype, q->dq, q->shift, q->t.rows, g->head_size);
}

// Writes rows [from, to) of dK and dV of a head to the tensors; dk and dv start at row `from`.
static void flush(const struct fa_call *call, const struct fa_sequence *seq, int64_t kv_head, const real *dk,
                  const real *dv, int64_t from, int64_t to) {
    const struct hal_flash_attention *g = call->shape;
    enum { AFTER = 8 };
    const int64_t d = g->head_size, e = g->value_size, size = element_size(g->dtype);
    for (int64_t key = from; key < to; key++) {
        char *to_k = (char *)rows_of(call->dk, g->dk, g->dtype, seq->batch, seq->k0 + key, kv_head);
        char *to_v = (char *)rows_of(call->dv, g->dv, g->dtype, seq->batch, seq->k0 + key, kv_head);
        if (key + AFTER < to) fetch_for_write(to_k + AFTER * g->dk[1] * size, d * size);
        if (key + AFTER < to) fetch_for_write(to_v + AFTER * g->dv[1] * size, e * size);
        write_row(to_k, NULL, dk + (key - from) * padded(d), (real)g->scale, g->dtype, d);
        write_row(to_v, NULL, dv + (key - from) * padded(e), (real)g->dropout_scale, g->dtype, e);
    }
}

// Writes rows [from, to) of dK and dV of a head from the scratch to the tensors.
static void flush_sums(const struct fa_call *call, const struct fa_sequence *seq, int64_t kv_head,
                       const struct backward_space *w, int64_t from, int64_t to) {
    const int64_t row = from - w->key0;
    flush(call, seq, kv_head, w->dk + row * padded(call->shape->head_size),
          w->dv + row * padded(call->shape->value_size), from, to);
}

// Zeroes rows [from, to) of dK and dV of a head, whose keys no query sees.
static void flush_zeros(const struct fa_call *call, const struct fa_sequence *seq, int64_t kv_head, real *buffer,
                        int64_t from, int64_t to) {
    const int64_t d = padded(call->shape->head_size), e = padded(call->shape->value_size);
    memset(buffer, 0, (size_t)(d > e ? d : e) * sizeof(real));
    for (int64_t key = from; key < to; key++) flush(call, seq, kv_head, buffer, buffer, key, key + 1);
}

// Moves the gradients of keys [from, to) to the start of the scratch.
static void slide(struct backward_space *w, int64_t ld, int64_t lde, int64_t from, int64_t to) {
    memmove(w->dk, w->dk + (from - w->key0) * ld, (size_t)((to - from) * ld) * sizeof(real));
    memmove(w->dv, w->dv + (from - w->key0) * lde, (size_t)((to - from) * lde) * sizeof(real));
    w->key0 = from;
}

static struct backward_space backward_carve(struct carver *c, const struct fa_call *call, const struct fa_plan *plan) {
    const int64_t d = padded(call->shape->head_size), e = padded(call->shape->value_size), most = d > e ? d : e;
    const int64_t keys = plan->longest_sk + 2;
    // With a window, a sweep sees few of the keys. Scratch for four times as many stays in L2, and is rarely moved.
    const int64_t window = call->shape->pre + call->shape->next + 1;
    const int64_t seen = (window > 0 ? window : 0) + FA_SWEEP * FA_QUERIES + FA_SUB + 2;
    struct backward_space w = {
        .qt = carve(c, FA_SWEEP * d * FA_QUERIES, sizeof(unit)),
        .dot = carve(c, FA_SWEEP * e * FA_QUERIES, sizeof(unit)),
        .qp = carve(c, FA_SWEEP * d * ROW, sizeof(unit)),
        .dop = carve(c, FA_SWEEP * e * ROW, sizeof(unit)),
        .rows = carve(c, most * FA_QUERIES, sizeof(unit)),
        .dq = carve(c, FA_SWEEP * d * FA_QUERIES, sizeof(real)),
        .s = carve(c, FA_KEYS * FA_QUERIES, sizeof(real)),
        .dp = carve(c, FA_KEYS * FA_QUERIES, sizeof(real)),
        .buffer = carve(c, 2 * most, sizeof(real)),
        .bytes = carve(c, 1, sizeof(struct bytes_tile)),
        .k = carve(c, keys * padded(units(d)), sizeof(unit)),
        .v = carve(c, keys * padded(units(e)), sizeof(unit)),
        .cap = call->shape->softcap > 0 ? carve(c, FA_KEYS * FA_QUERIES, sizeof(real)) : NULL,
        .db = call->dbias ? carve(c, FA_KEYS * FA_QUERIES, sizeof(real)) : NULL,
    };
    if (KU == 2) {
        w.p_rows = carve(c, FA_KEYS * ROW, sizeof(unit));
        w.ds_rows = carve(c, FA_KEYS * ROW, sizeof(unit));
        w.ds_pairs = carve(c, FA_KEYS / KU * FA_QUERIES, sizeof(unit));
        w.kp = carve(c, units(keys) * d, sizeof(unit));
    } else {
        w.p_rows = (unit *)w.s, w.ds_rows = w.ds_pairs = (unit *)w.dp, w.kp = w.k;
    }
    w.capacity = 4 * seen < keys ? 4 * seen : keys;
    w.dk = carve(c, w.capacity * d, sizeof(real));
    w.dv = carve(c, w.capacity * e, sizeof(real));
    return w;
}

static void backward_piece(const struct fa_call *call, struct fa_piece *piece, struct backward_space *w) {
    const struct hal_flash_attention *g = call->shape;
    const struct fa_sequence seq = fa_sequence(call, piece->batch);
    const char *ks = rows_of(call->k, g->k, g->dtype, seq.batch, seq.k0, piece->kv_head);
    const char *vs = rows_of(call->v, g->v, g->dtype, seq.batch, seq.k0, piece->kv_head);
    const int64_t d = g->head_size, e = g->value_size, ld = padded(d), lde = padded(e), group = g->heads / g->kv_heads;
    struct operands o = {.k = operand_of(ks, g->k[1], d, g, 0, 0, w->k), .v = operand_of(vs, g->v[1], e, g, 0, 0, w->v)};
    o.kp = KU == 1 ? o.k : operand_of(ks, g->k[1], d, g, 1, 0, w->kp);
    // Three positions along the keys, which only move forward: keys are packed and their gradients are zeroed just
    // before the first use, and the gradients are flushed after the last use, while they are in cache. The scratch of a
    // cut head is kept for backward_reduce, and has room for all keys. A sweep that sees no key (first == end) leaves
    // the last two where they are, because its own position may lie beyond the scratch.
    int64_t packed = -1, zeroed = 0, flushed = 0;
    struct fa_sweep sweep;
    for (int64_t tile = piece->t0; tile < piece->t1 && seq.sq > 0; tile = sweep.t1) {
        sweep = fa_sweep(&seq, tile, piece->t1);
        const int64_t first = sweep.first, end = sweep.end, count = sweep.t1 - sweep.t0;
        if (tile == piece->t0 && piece->slot >= 0) zeroed = first;
        if (tile == piece->t0) piece->k_first = first;
        if (packed < first) packed = first;
        operand_fill(&o.k, g, packed, end);
        operand_fill(&o.v, g, packed, end);
        if (KU == 2) operand_fill(&o.kp, g, packed, end);
        if (packed < end) packed = end & ~(int64_t)1;
        if (piece->slot < 0 && flushed < first && first < end) {  // no later sweep sees keys before `first`
            const int64_t known = first < zeroed ? first : zeroed;
            flush_sums(call, &seq, piece->kv_head, w, flushed, known);
            if (zeroed < first) flush_zeros(call, &seq, piece->kv_head, w->buffer, zeroed, first);
            flushed = first;
            if (zeroed < first) zeroed = first;
        }
        if (zeroed < end && first < end) {
            if (end - w->key0 > w->capacity) slide(w, ld, lde, flushed, zeroed);
            memset(w->dk + (zeroed - w->key0) * ld, 0, (size_t)((end - zeroed) * ld) * sizeof(real));
            memset(w->dv + (zeroed - w->key0) * lde, 0, (size_t)((end - zeroed) * lde) * sizeof(real));
            zeroed = end;
        }
        for (int64_t head = piece->kv_head * group; head < (piece->kv_head + 1) * group; head++) {
            struct backward_state q[FA_SWEEP];
            struct ahead ahead;
            struct fa_sweep next = sweep;
            int64_t next_head = head;
            if (ahead_start(&ahead, call, piece, &seq, &next_head, &next)) {
                tiles_ahead(&ahead, call, &seq, call->q, g->q, d, next_head, &next);
                tiles_ahead(&ahead, call, &seq, call->dout, g->dout, e, next_head, &next);
                tiles_ahead(&ahead, call, &seq, call->out, g->out, e, next_head, &next);
                tiles_ahead(&ahead, call, &seq, call->dq, g->dq, d, next_head, &next);
            }
            for (int64_t i = 0; i < count; i++) backward_open(call, &seq, head, sweep.t0 + i, w, &q[i]);
            // After the last sweep a tile of keys receives no further sums: its gradients are written while they are in
            // cache.
            const int last = piece->slot < 0 && sweep.t1 >= piece->t1 && head + 1 == (piece->kv_head + 1) * group;
            for (int64_t k0 = first; k0 < end; k0 += FA_KEYS) {
                for (int64_t i = 0; i < count; i++) backward_keys(call, &seq, head, k0, &o, w, &q[i], &ahead);
                if (!last) continue;
                const int64_t done = k0 + FA_KEYS < end ? k0 + FA_KEYS : end;
                flush_sums(call, &seq, piece->kv_head, w, flushed, done);
                flushed = done;
            }
            for (int64_t i = 0; i < count; i++) backward_close(call, &seq, head, &q[i]);
        }
    }
    piece->k_end = zeroed;
    if (piece->slot >= 0) return;
    flush_sums(call, &seq, piece->kv_head, w, flushed, zeroed);
    flush_zeros(call, &seq, piece->kv_head, w->buffer, zeroed, seq.sk);
}

// dK and dV of a head that is divided into pieces: the sum of the pieces' partial results, in the order of the pieces.
// Called by every thread of the team.
static void backward_reduce(const struct fa_call *call, const struct fa_piece *pieces, int64_t count, const real *slots,
                            int64_t slot_size, real *sum) {
    const struct fa_sequence seq = fa_sequence(call, pieces->batch);
    const int64_t ld = padded(call->shape->head_size), lde = padded(call->shape->value_size);
    const int64_t half = slot_size / (ld + lde) * ld;
#pragma omp for schedule(static) nowait
    for (int64_t key = 0; key < seq.sk; key++) {
        memset(sum, 0, (size_t)(ld + lde) * sizeof(real));
        for (int64_t p = 0; p < count; p++) {
            if (key < pieces[p].k_first || key >= pieces[p].k_end) continue;
            const real *dk = slots + pieces[p].slot * slot_size + key * ld;
            const real *dv = slots + pieces[p].slot * slot_size + half + key * lde;
            for (int64_t e = 0; e < ld; e++) sum[e] += dk[e];
            for (int64_t e = 0; e < lde; e++) sum[ld + e] += dv[e];
        }
        flush(call, &seq, pieces->kv_head, sum, sum + ld, key, key + 1);
    }
}

int CAT(fa_backward_, FA_KIND)(const struct fa_call *call, const struct fa_plan *plan) {
    struct carver counter = {NULL, 0};
    backward_carve(&counter, call, plan);
    const size_t bytes = (counter.used + 4095) / 4096 * 4096 + 256;
    const int64_t keys = plan->longest_sk + 2, half = keys * padded(call->shape->head_size);
    const int64_t slot_size = half + keys * padded(call->shape->value_size);
    char *workspace = fa_acquire(bytes * (size_t)plan->threads + (size_t)(plan->slot_count * slot_size) * sizeof(real));
    if (!workspace) return 1;
    real *slots = (real *)(workspace + bytes * (size_t)plan->threads);
#pragma omp parallel num_threads(plan->threads)
    {
        struct carver carver = {workspace + bytes * (size_t)omp_get_thread_num(), 0};
        const struct backward_space own = backward_carve(&carver, call, plan);
        if (FA_TILES) {
            memset(own.p_rows, 0, FA_KEYS * ROW * sizeof(unit));
            memset(own.ds_rows, 0, FA_KEYS * ROW * sizeof(unit));
        }
        tiles_begin(TILE);
        for (int64_t s; (s = fa_next_segment(plan, omp_get_thread_num())) >= 0;)
            for (int64_t p = plan->segments[s]; p < plan->segments[s + 1]; p++) {
                struct backward_space space = own;
                if (plan->pieces[p].slot >= 0) {
                    space.dk = slots + plan->pieces[p].slot * slot_size;
                    space.dv = space.dk + half;
                    space.capacity = keys;
                }
                backward_piece(call, &plan->pieces[p], &space);
            }
#pragma omp barrier
        for (int64_t p = 0, count; p < plan->piece_count; p += count) {
            const struct fa_piece *first = &plan->pieces[p];
            for (count = 1; p + count < plan->piece_count && first[count].t0 > 0; count++) continue;
            if (first->slot >= 0) backward_reduce(call, first, count, slots, slot_size, own.buffer);
        }
        tiles_end();
    }
    fa_release(workspace);
    return 0;
}
