// Forward pass of one arithmetic kind: see flash_attention.c for the algorithm.

// Constants of a call. Scores enter the exponential as 2^(c s): c = |scale| log2(e), the sign is applied to s. A scale
// of 0 becomes sign 0 with c = 1, so that hidden scores (-inf) never meet a factor of 0.
struct scaling {
    real sign, c;
};

static struct scaling scaling_of(const struct fa_call *call) {
    const double scale = call->shape->scale;
    if (call->adjusted) return (struct scaling){1, 1};
    if (scale == 0) return (struct scaling){0, 1};
    return (struct scaling){scale > 0 ? 1 : -1, (real)(fabs(scale) * LOG2E)};
}

// Keys or values of one head as an operand of the micro-kernel, in place or packed on first use.
struct operand {
    const unit *p;
    int64_t ld;
    const char *source;  // NULL: used in place
    int64_t stride;      // bytes
    int64_t d;           // elements of a row
    unit *packed;
    int pairs;
};

// Rows are used in place if their length is a multiple of a vector of units, and if they are adjacent (rows at a large
// stride would compete for the same cache sets) or are read only once (`decoding`).
static struct operand operand_of(const char *source, int64_t stride, int64_t d, const struct hal_flash_attention *g,
                                 int pairs, int decoding, unit *scratch) {
    const int64_t bytes = stride * element_size(g->dtype);
    if (is_unit(g->dtype) && !(pairs && KU == 2) && d % (KU * W) == 0 && (stride == d || (decoding && stride % KU == 0)))
        return (struct operand){(const unit *)source, stride / KU, NULL, bytes, d, NULL, pairs};
    const int64_t ld = pairs ? padded(d) : padded(units(d));
    return (struct operand){scratch, ld, source, bytes, d, scratch, pairs};
}

// Packs keys [from, to); from is even.
static void operand_fill(const struct operand *o, const struct hal_flash_attention *g, int64_t from, int64_t to) {
    if (!o->source || from >= to) return;
    const char *rows = o->source + from * o->stride;
    fetch_rows(rows, o->stride, to - from, o->d * element_size(g->dtype));
    if (o->pairs)
        pack_pairs(o->packed + from / KU * o->ld, o->ld, rows, o->stride, g->dtype, to - from, o->d);
    else
        pack_rows(o->packed + from * o->ld, o->ld, rows, o->stride, g->dtype, to - from, o->d);
}

static int64_t dropout_index0(const struct fa_call *call, const struct fa_sequence *seq, int64_t head) {
    const int64_t *index = call->shape->dropout_index;
    return index[0] + seq->batch * index[1] + head * index[2] + seq->q0 * index[3] + seq->k0;
}

static int64_t mask_offset(const struct fa_call *call, const struct fa_sequence *seq, int64_t head) {
    return seq->batch * call->shape->mask[0] + head * call->shape->mask[1];
}

static const char *rows_of(const char *base, const int64_t stride[3], int64_t dtype, int64_t batch, int64_t token,
                           int64_t head) {
    return base + (batch * stride[0] + token * stride[1] + head * stride[2]) * element_size(dtype);
}

static real *lse_of(const struct fa_call *call, const struct fa_sequence *seq, int64_t head) {
    const struct hal_flash_attention *g = call->shape;
    return (real *)call->lse + ((call->cu_q ? 0 : seq->batch * g->heads) + head) * g->sq + seq->q0;
}

// Moves tile t to the keys from k0 on; returns 0 if none of its queries sees any of them.
static int tile_open(struct tile *t, struct bytes_tile *bytes, const struct fa_call *call, const struct fa_sequence *seq,
                     int64_t head, int64_t k0) {
    int64_t first, end;
    fa_visible(seq, t->i0, t->rows, &first, &end);
    if (k0 >= end || k0 + FA_KEYS <= first) return 0;
    t->k0 = k0;
    t->keys = (int)(end - k0 < FA_KEYS ? end - k0 : FA_KEYS);
    if (!tile_visible(t, seq)) return 0;
    t->has_mask = call->mask != NULL;
    t->has_keep = call->shape->dropout_threshold > 0;
    if (t->has_mask && !tile_mask(t, bytes, call->mask + mask_offset(call, seq, head), call->shape->mask[2],
                                  call->shape->mask[3]))
        return 0;
    if (t->has_keep) tile_keep(t, bytes, call, dropout_index0(call, seq, head));
    return 1;
}

// Adds the rows of a tensor that belong to a sweep's queries to the prefetches.
static void tiles_ahead(struct ahead *a, const struct fa_call *call, const struct fa_sequence *seq, const char *base,
                        const int64_t stride[3], int64_t d, int64_t head, const struct fa_sweep *sweep) {
    const struct hal_flash_attention *g = call->shape;
    const int64_t size = element_size(g->dtype), from = fa_first(seq, sweep->t0);
    const int64_t to = fa_first(seq, sweep->t1 - 1) + fa_rows(seq, sweep->t1 - 1);
    ahead_add(a, rows_of(base, stride, g->dtype, seq->batch, seq->q0 + from, head), stride[1] * size, d * size,
              to - from);
}

// Advances *head and *sweep to the next ones, and prefetches the keys and values that are new there. Returns whether
// the caller should add the rows of the queries.
static int ahead_start(struct ahead *a, const struct fa_call *call, const struct fa_piece *piece,
                       const struct fa_sequence *seq, int64_t *head, struct fa_sweep *sweep) {
    const struct hal_flash_attention *g = call->shape;
    const int64_t size = element_size(g->dtype), group = g->heads / g->kv_heads;
    const int64_t d = g->head_size, e = g->value_size;
    const struct fa_sweep now = *sweep;
    a->count = 0;
    a->steps = ((now.end - now.first) / FA_KEYS + 1) * (now.t1 - now.t0) * FA_STEPS;
    if (++*head < (piece->kv_head + 1) * group) return 1;
    if (now.t1 >= fa_tiles(seq)) return 0;
    *head = piece->kv_head * group;
    *sweep = fa_sweep(seq, now.t1, fa_tiles(seq));
    const int64_t from = now.end > sweep->first ? now.end : sweep->first;
    const char *ks = rows_of(call->k, g->k, g->dtype, seq->batch, seq->k0 + from, piece->kv_head);
    const char *vs = rows_of(call->v, g->v, g->dtype, seq->batch, seq->k0 + from, piece->kv_head);
    ahead_add(a, ks, g->k[1] * size, d * size, sweep->end - from);
    ahead_add(a, vs, g->v[1] * size, e * size, sweep->end - from);
    return 1;
}

struct forward_space {
    unit *qt;       // FA_SWEEP x [units(d)][48] Q^T
    unit *rows;     // [48][padded] a tile of rows
    real *s;        // [96][48] scores, then probabilities (as units, in place)
    real *o;        // FA_SWEEP x [48][padded] O
    unit *k, *v;    // packed operands of a head
    struct bytes_tile *bytes;
};

HAL_INLINE ivec far_from_zero(vec x) { return max(x, splat(0) - x) > splat(COARSE); }

// For `count` keys (4, or KU) of one vector of queries: replaces S by P and adds P to sum[]. Probabilities are stored
// as units of KU keys at row k / KU, over scores that have been read already. `keep`: the dropout bytes, or NULL. shift
// = top c. `coarse`: for some queries shift is so large that its rounding error is more than exp2 tolerates; for those,
// the maximum is subtracted before scaling.
HAL_INLINE void exponentiate(int count, real *column, int k, const uint8_t *keep, real c, vec top, vec shift, int coarse,
                             vec sum[4]) {
    vec p[4];
#pragma GCC unroll 4
    for (int u = 0; u < count; u++) {
        const vec s = load(column + (k + u) * FA_QUERIES);
        p[u] = s * c - shift;
        if (coarse) p[u] = select(far_from_zero(shift), (s - top) * c, p[u]);
        p[u] = exp2_of(p[u]);
        sum[u] += p[u];
        if (keep) p[u] = (vec)((ivec)p[u] & lanes_of(keep + (k + u) * FA_QUERIES));
    }
#pragma GCC unroll 4
    for (int u = 0; u < count; u += KU)
        store_units((unit *)column + (k + u) / KU * FA_QUERIES, KU == 2 ? pair(p[u], p[u + 1]) : pair(p[u], p[u]));
}

HAL_INLINE vec exponentiate_all(real *column, int from, int to, const uint8_t *keep, real c, vec top, vec shift,
                                int coarse) {
    vec sum[4] = {{0}, {0}, {0}, {0}};
    int k = from;
    for (; k + 4 <= to; k += 4) exponentiate(4, column, k, keep, c, top, shift, coarse, sum);
    for (; k < to; k += KU) exponentiate(KU, column, k, keep, c, top, shift, coarse, sum);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Online softmax of block column v: replaces S by P, updates maximum m and sum l, and rescales O. All three may be
// relative to a stale maximum, as long as no exponential exceeds 2^SLACK: the result is the same and O is rescaled less
// often. (Not inlined: in a larger function the compiler moves vectors to the stack between the exponentials.)
__attribute__((noinline)) static void softmax_columns(const struct tile *t, int v, const struct bytes_tile *bytes, real c, int64_t d, real *s,
                            real *o, real *m, real *l) {
    const int from = t->from[v] * FA_SUB, to = least(t->to[v] * FA_SUB, t->keys);
    for (int n = v * SUB_VECTORS; n < (v + 1) * SUB_VECTORS; n++) {
        real *column = s + n * W;
        const vec old = load(m + n * W);
        vec top[4] = {old, old, old, old};
        int k = from;
        for (; k + 4 <= to; k += 4)
#pragma GCC unroll 4
            for (int u = 0; u < 4; u++) top[u] = max(top[u], load(column + (k + u) * FA_QUERIES));
        for (; k < to; k++) top[0] = max(top[0], load(column + k * FA_QUERIES));
        const vec grown = max(max(top[0], top[1]), max(top[2], top[3]));
        const int rescale = exceeds(grown * c, old * c + SLACK);
        const vec now = rescale ? grown : old;
        // A query without a visible key keeps m = -inf; subtracting 0 instead makes its probabilities exp(-inf) = 0.
        const vec subtracted = select(now == splat(-(real)INFINITY), splat(0), now), shift = subtracted * c;
        if (KU == 2 && to % 2) store(column + to * FA_QUERIES, splat(-(real)INFINITY));
        const uint8_t *keep = t->has_keep ? bytes->keep[0] + n * W : NULL;
        const int coarse = exceeds(max(shift, splat(0) - shift), splat(COARSE));
        const vec sum = coarse ? exponentiate_all(column, from, to, keep, c, subtracted, shift, 1)
                        : keep ? exponentiate_all(column, from, to, keep, c, subtracted, shift, 0)
                               : exponentiate_all(column, from, to, NULL, c, subtracted, shift, 0);
        if (!rescale) {
            store(l + n * W, load(l + n * W) + sum);
            continue;
        }
        const vec alpha = exp2_of(old * c - shift);
        store(m + n * W, now);
        store(l + n * W, load(l + n * W) * alpha + sum);
        if (!t->seen[v]) continue;
        for (int i = 0; i < W; i++) {
            real *row = o + (n * W + i) * padded(d);
            for (int64_t e = 0; e < d; e += W) store(row + e, load(row + e) * alpha[i]);
        }
    }
}

// sums[q][d] += A B over the tile's visible keys; = the first time for a block column. a: [96 / KU][48] units along the
// keys.
static void add_keys(struct tile *t, const struct fa_sequence *seq, int64_t d, const unit *a, const struct operand *b,
                     real *sums, int64_t ld) {
    for (int v = 0, next; v < FA_SUBS; v = next) {
        for (next = v + 1; next < FA_SUBS && t->from[next] == t->from[v] && t->to[next] == t->to[v]; next++)
            if (t->seen[next] != t->seen[v]) break;
        const int from = t->from[v] * FA_SUB, to = least(t->to[v] * FA_SUB, t->keys);
        if (from >= to) continue;
        const int64_t key = t->k0 + from, ahead = t->i0 + v * FA_SUB - key;
        multiply_columns((next - v) * FA_SUB, (d + W - 1) / W, units(to - from), a + from / KU * FA_QUERIES + v * FA_SUB,
                         FA_QUERIES, b->p + key / KU * b->ld, b->ld, sums + v * FA_SUB * ld, ld, t->seen[v],
                         &(struct band){ahead + seq->lo, ahead + seq->hi});
        for (int u = v; u < next; u++) t->seen[u] = 1;
    }
}

// Zeroes the sums of block columns without a visible key.
static void close_sums(const struct tile *t, real *sums, int64_t ld) {
    for (int v = 0; v < FA_SUBS; v++)
        if (!t->seen[v]) memset(sums + v * FA_SUB * ld, 0, (size_t)(FA_SUB * ld) * sizeof(real));
}

// A tile of queries during a sweep over the keys.
struct forward_state {
    struct tile t;
    unit *qt;                // [units(d)][48] Q^T
    real *o;                 // [48][padded] O
    real m[FA_QUERIES] __attribute__((aligned(64))), l[FA_QUERIES] __attribute__((aligned(64)));
};

static void forward_open(const struct fa_call *call, const struct fa_sequence *seq, int64_t head, int64_t tile,
                         const struct forward_space *w, struct forward_state *q) {
    const struct hal_flash_attention *g = call->shape;
    const int64_t d = g->head_size, ldr = padded(units(d)), i0 = fa_first(seq, tile);
    q->t = (struct tile){.i0 = i0, .rows = (int)fa_rows(seq, tile)};
    q->qt = w->qt + tile % FA_SWEEP * padded(d) * FA_QUERIES;
    q->o = w->o + tile % FA_SWEEP * padded(g->value_size) * FA_QUERIES;
    for (int i = 0; i < FA_QUERIES; i++) q->m[i] = -(real)INFINITY, q->l[i] = 0;
    const char *rows = rows_of(call->q, g->q, g->dtype, seq->batch, seq->q0 + i0, head);
    fetch_rows(rows, g->q[1] * element_size(g->dtype), q->t.rows, d * element_size(g->dtype));
    const int64_t used = padded(q->t.rows);
    // Rows at a large stride are slower to transpose in place.
    const int direct = g->q[1] == d || (KU == 2 && g->q[1] % KU == 0);
    if (is_unit(g->dtype) && q->t.rows == used && d % (KU * PAD) == 0 && direct) {
        transpose(q->qt, FA_QUERIES, (const unit *)rows, g->q[1] / KU, used, ldr);
    } else {
        pack_rows(w->rows, ldr, rows, g->q[1] * element_size(g->dtype), g->dtype, q->t.rows, d);
        memset(w->rows + q->t.rows * ldr, 0, (size_t)((used - q->t.rows) * ldr) * sizeof(unit));
        transpose(q->qt, FA_QUERIES, w->rows, ldr, used, ldr);
    }
}

static void forward_keys(const struct fa_call *call, const struct fa_sequence *seq, int64_t head, int64_t k0,
                         const struct operand *k, const struct operand *v, const struct forward_space *w,
                         struct forward_state *q, struct ahead *ahead) {
    const struct scaling scale = scaling_of(call);
    const int64_t d = call->shape->head_size, e = call->shape->value_size;
    const struct adjust a = call->adjusted ? adjust_of(call, seq, head) : (struct adjust){0};
    struct tile *t = &q->t;
    if (!tile_open(t, w->bytes, call, seq, head, k0)) return;
#if FA_FUSED
    if (scale.sign == 1 && !call->adjusted && tile_whole(t, seq) &&
        tile_fused(t->keys, k->p + k0 * k->ld, k->ld, q->qt, units(d), scale.c, q->m, q->l, (unit *)w->s)) {
        for (int i = 0; i < FA_STEPS / 2; i++) ahead_step(ahead);
        add_keys(t, seq, e, (const unit *)w->s, v, q->o, padded(e));
        for (int i = FA_STEPS / 2; i < FA_STEPS; i++) ahead_step(ahead);
        return;
    }
#endif
    tile_scores(t, seq, w->bytes, k->p, k->ld, q->qt, units(d), scale.sign, call->adjusted ? &a : NULL,
                w->s, NULL);
    ahead_step(ahead), ahead_step(ahead);
    for (int b = 0; b < FA_SUBS; b++) {
        ahead_step(ahead);
        if (t->from[b] < t->to[b]) softmax_columns(t, b, w->bytes, scale.c, e, w->s, q->o, q->m, q->l);
    }
    ahead_step(ahead), ahead_step(ahead);
    add_keys(t, seq, e, (const unit *)w->s, v, q->o, padded(e));
}

// Adds a sink, in base 2, to the sum l of exponentials relative to m. part: the factor of O, which stays relative to the
// old m.
HAL_INLINE void close_sink(real sink, vec *m, vec *l, vec *part) {
    const vec top = max(*m, splat(sink)), now = select(top == splat(-(real)INFINITY), splat(0), top);
    *part = exp2_of(*m - now);
    *l = *l * *part + exp2_of(splat(sink) - now);
    *m = now;
}

static void forward_close(const struct fa_call *call, const struct fa_sequence *seq, int64_t head,
                          struct forward_state *q) {
    const struct hal_flash_attention *g = call->shape;
    const real c = scaling_of(call).c, keep = (real)g->dropout_scale;
    char *out = (char *)rows_of(call->out_w, g->out, g->dtype, seq->batch, seq->q0 + q->t.i0, head);
    char *rest = call->rest_w ? call->rest_w + (out - call->out_w) : NULL;
    for (int i = 0; i < FA_QUERIES; i += W) {
        vec l = load(q->l + i), m = load(q->m + i) * c, part = splat(1);
        if (call->sinks) close_sink(((const real *)call->sinks)[head] * (real)LOG2E, &m, &l, &part);
        const ivec none = l == splat(0);
        store(q->m + i, select(none, splat(-(real)INFINITY), (m + log2_of(l)) * (real)0.6931471805599453));
        store(q->l + i, select(none, splat(0), keep * part / l));
    }
    memcpy(lse_of(call, seq, head) + q->t.i0, q->m, (size_t)q->t.rows * sizeof(real));
    close_sums(&q->t, q->o, padded(g->value_size));
    write_tile(out, rest, g->out[1] * element_size(g->dtype), g->dtype, q->o, q->l, q->t.rows, g->value_size);
}

// Carves aligned buffers out of a workspace; with base NULL it only counts.
struct carver {
    char *base;
    size_t used;
};
static void *carve(struct carver *c, int64_t count, size_t size) {
    void *p = c->base ? c->base + c->used : NULL;
    c->used += ((size_t)count * size + 63) / 64 * 64 + 64;  // + 64: so that buffers do not start in the same cache set
    return p;
}

static struct forward_space forward_carve(struct carver *c, const struct fa_call *call, const struct fa_plan *plan) {
    const int64_t d = padded(call->shape->head_size), e = padded(call->shape->value_size);
    const int64_t keys = plan->longest_sk + 2;
    return (struct forward_space){
        .qt = carve(c, FA_SWEEP * d * FA_QUERIES, sizeof(unit)),
        .rows = carve(c, d * FA_QUERIES, sizeof(unit)),
        .s = carve(c, FA_KEYS * FA_QUERIES, sizeof(real)),
        .o = carve(c, FA_SWEEP * e * FA_QUERIES, sizeof(real)),
        .bytes = carve(c, 1, sizeof(struct bytes_tile)),
        .k = carve(c, keys * padded(units(d)), sizeof(unit)),
        .v = carve(c, units(keys) * e, sizeof(unit)),
    };
}

// The keys of a head, up to `end`, that a thread has packed for the tiles before t1. Later tiles of the head use them;
// earlier ones, which the thread takes over from another, may see keys before the first packed one.
struct packed {
    int64_t batch, kv_head, t1, end;
};

static void forward_piece(const struct fa_call *call, const struct fa_sequence *seq, const struct fa_piece *piece,
                          const struct forward_space *w, struct packed *packed) {
    const struct hal_flash_attention *g = call->shape;
    const char *ks = rows_of(call->k, g->k, g->dtype, seq->batch, seq->k0, piece->kv_head);
    const char *vs = rows_of(call->v, g->v, g->dtype, seq->batch, seq->k0, piece->kv_head);
    const struct operand k = operand_of(ks, g->k[1], g->head_size, g, 0, 0, w->k);
    const struct operand v = operand_of(vs, g->v[1], g->value_size, g, 1, 0, w->v);
    const int64_t group = g->heads / g->kv_heads;
    if (packed->batch != piece->batch || packed->kv_head != piece->kv_head || packed->t1 > piece->t0) packed->end = 0;
    packed->batch = piece->batch, packed->kv_head = piece->kv_head, packed->t1 = piece->t1;
    struct fa_sweep sweep;
    for (int64_t tile = piece->t0; tile < piece->t1 && seq->sq > 0; tile = sweep.t1) {
        sweep = fa_sweep(seq, tile, piece->t1);
        // The visible range only moves forward, so every key is packed once, just before its first use.
        if (packed->end < sweep.first) packed->end = sweep.first;
        operand_fill(&k, g, packed->end, sweep.end);
        operand_fill(&v, g, packed->end, sweep.end);
        if (packed->end < sweep.end) packed->end = sweep.end & ~(int64_t)1;  // an incomplete pair is packed again
        for (int64_t head = piece->kv_head * group; head < (piece->kv_head + 1) * group; head++) {
            struct forward_state q[FA_SWEEP];
            const int64_t count = sweep.t1 - sweep.t0;
            struct ahead ahead;
            struct fa_sweep next = sweep;
            int64_t next_head = head;
            if (ahead_start(&ahead, call, piece, seq, &next_head, &next)) {
                tiles_ahead(&ahead, call, seq, call->q, g->q, g->head_size, next_head, &next);
                tiles_ahead(&ahead, call, seq, call->out_w, g->out, g->value_size, next_head, &next);
            }
            for (int64_t i = 0; i < count; i++) forward_open(call, seq, head, sweep.t0 + i, w, &q[i]);
            for (int64_t k0 = sweep.first; k0 < sweep.end; k0 += FA_KEYS)
                for (int64_t i = 0; i < count; i++) forward_keys(call, seq, head, k0, &k, &v, w, &q[i], &ahead);
            for (int64_t i = 0; i < count; i++) forward_close(call, seq, head, &q[i]);
        }
    }
}
