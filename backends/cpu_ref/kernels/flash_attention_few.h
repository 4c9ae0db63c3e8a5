// Forward pass of one arithmetic kind for few queries, as when a model writes text: K and V are read once, which takes
// longer than all that is computed from them.
//
// In the tiles of forward.h queries fill the lanes: of one query, 15 lanes of 16 stand idle, and each head of a group
// sweeps over K and V for itself. Here the queries of all heads of a group are rows, up to 48; for 96 keys at a time
//   S [row][key] = Q K^T      channels fill the lanes; those of W keys' products are added up crosswise
//   P = exp(scale S - max)    keys fill the lanes
//   O [row][d] += P V         P's scalars are broadcast, channels fill the lanes (gemm.h)
// What rows see, and what becomes of infinities, NaN and huge scores, is as in forward.h: hence heads with masks of their
// own, which what another one hides must not reach (0 times NaN), sweep alone. A head's keys are not divided among threads.
enum { FEW_DOTS = W < 8 ? W : 8 };  // dot products at a time: two multiply-adds a cycle, each of which takes four

HAL_INLINE void add_pairs(uvec r[16], int s) {
#pragma GCC unroll 16
    for (int i = 0; i < W; i += 2 * s) r[i] = (uvec)((vec)r[i] + (vec)r[i + s]);
}

// Lane l of the result is the sum of r[l]'s lanes: a transposition that adds up after every step.
HAL_INLINE vec add_across(uvec r[16]) {
    interleave(r, 1);
    add_pairs(r, 1);
    if (PART == 4) {
        interleave(r, 2);
        add_pairs(r, 2);
    }
    if (W > (int)PART) {
        gather_parts(r, PART);
        add_pairs(r, PART);
    }
    if (W > 2 * (int)PART) {
        gather_parts(r, 2 * PART);
        add_pairs(r, 2 * PART);
    }
    return (vec)r[0];
}

// The products of a row of Q with W rows of K, of which `count` exist; the last stands in for those that follow.
HAL_INLINE vec dots(const unit *q, const unit *k, int64_t ld, int count, int64_t depth) {
    uvec r[16];
#pragma GCC unroll 4
    for (int first = 0; first < W; first += FEW_DOTS) {
        const unit *rows[FEW_DOTS];
        vec sum[FEW_DOTS];
#pragma GCC unroll 8
        for (int i = 0; i < FEW_DOTS; i++) rows[i] = k + least(first + i, count - 1) * ld, sum[i] = (vec){0};
        for (int64_t e = 0; e < depth; e += W) {
            const uvec qe = load_units(q + e);
#pragma GCC unroll 8
            for (int i = 0; i < FEW_DOTS; i++) sum[i] = MAC_LANES(sum[i], qe, load_units(rows[i] + e));
        }
#pragma GCC unroll 8
        for (int i = 0; i < FEW_DOTS; i++) r[first + i] = (uvec)sum[i];
    }
    return add_across(r);
}

// The rows of a sweep: all queries of the heads from `head` on. At a tile of keys: those from k0 on.
struct few {
    int64_t head, k0;
    int rows, keys;
    unit *q;  // [rows][padded(units(d))]
    real *s;  // [rows][96] scores, then probabilities (as units, in place)
    real *o;  // [rows][padded(d)]
    vec top[FA_QUERIES], l[FA_QUERIES];  // maxima of the tile and sums, over every W-th key
    real m[FA_QUERIES];
    uint8_t hidden[FA_QUERIES][FA_KEYS];  // by the mask
};

// Reads the mask under the tile; only keys [*from, *to) are visible to any row.
static void few_mask(struct few *f, const struct fa_call *call, const struct fa_sequence *seq, int *from, int *to) {
    const int64_t *step = call->shape->mask;
    *from = f->keys, *to = 0;
    for (int r = 0; r < f->rows; r++) {
        const uint8_t *mask = call->mask + mask_offset(call, seq, f->head + r / seq->sq) + r % seq->sq * step[2];
        uint8_t *hidden = f->hidden[r];
        for (int k = 0; k < f->keys; k++) hidden[k] = mask[(f->k0 + k) * step[3]] != 0;
        int first = 0, end = f->keys;
        while (first < *from && hidden[first]) first++;
        while (end > *to && hidden[end - 1]) end--;
        *from = first, *to = end;
    }
}

// S of the W keys from `at` on, -inf where hidden and from key `to` on.
static void few_scores(struct few *f, const struct fa_call *call, const struct fa_sequence *seq, int at, int to,
                       const struct operand *k) {
    const int64_t depth = (units(call->shape->head_size) + W - 1) / W * W, ldq = padded(units(call->shape->head_size));
    const real sign = scaling_of(call->shape->scale).sign;
    ivec key;
    for (int l = 0; l < W; l++) key[l] = at + l;
    for (int r = 0; r < f->rows; r++) {
        const int64_t i = r % seq->sq - f->k0;
        const vec s = dots(f->q + r * ldq, k->p + at * k->ld, k->ld, to - at, depth) * sign;
        ivec hide = key < splat_lane(clamp(i + seq->lo, 0, FA_KEYS));
        hide |= key >= splat_lane(clamp(i + seq->hi + 1, 0, to));
        if (call->mask) hide |= lanes_of(&f->hidden[r][at]);
        const vec shown = select(hide, splat(-(real)INFINITY), s);
        store(f->s + r * FA_KEYS + at, shown);
        f->top[r] = max(f->top[r], shown);
    }
}

// Online softmax of row r: S -> P, in place, from key `from` (a multiple of W) on; m, l and O as in softmax_columns.
static void few_softmax(struct few *f, int r, int from, int to, real c, int64_t ldo) {
    const real old = f->m[r];
    real now = old;
    if (exceeds(f->top[r] * c, splat(old * c + SLACK)))
        for (int l = 0; l < W; l++) now = f->top[r][l] > now ? f->top[r][l] : now;
    const vec top = splat(now == -(real)INFINITY ? 0 : now), shift = top * c;
    const int coarse = exceeds(max(shift, splat(0) - shift), splat(COARSE));
    if (now > old) {
        const vec alpha = exp2_of(coarse ? (splat(old) - top) * c : splat(old) * c - shift);
        f->l[r] *= alpha;
        for (int64_t e = 0; e < ldo; e += W) store(f->o + r * ldo + e, load(f->o + r * ldo + e) * alpha);
        f->m[r] = now;
    }
    real *row = f->s + r * FA_KEYS;
    for (int at = from; at < to; at += W) {
        const vec s = load(row + at), p = exp2_of(coarse ? (s - top) * c : s * c - shift);
        f->l[r] += p;
        store_rounded((unit *)row + at / KU, p);
    }
}

// Adds the keys [k0, k0 + keys) to the rows' sums.
static void few_keys(struct few *f, const struct fa_call *call, const struct fa_sequence *seq, const char *ks,
                     const char *vs, const struct forward_space *w) {
    const struct hal_flash_attention *g = call->shape;
    const int64_t d = g->head_size, size = element_size(g->dtype);
    int from = 0, to = f->keys;
    if (call->mask) few_mask(f, call, seq, &from, &to);
    if (from >= to) return;
    const int first = from / W * W;
    const struct operand k = operand_of(ks + f->k0 * g->k[1] * size, g->k[1], g, 0, 1, w->k);
    const struct operand v = operand_of(vs + f->k0 * g->v[1] * size, g->v[1], g, 1, 1, w->v);
    operand_fill(&k, g, first, to);
    for (int r = 0; r < f->rows; r++) f->top[r] = splat(f->m[r]);
    for (int at = first; at < to; at += W) few_scores(f, call, seq, at, to, &k);
    for (int r = 0; r < f->rows; r++) few_softmax(f, r, first, to, scaling_of(g->scale).c, padded(d));
    from -= from % KU;
    operand_fill(&v, g, from, to);
    const unit *p = (unit *)f->s + from / KU;
    add_rows(f->rows, (d + W - 1) / W, units(to - from), p, FA_KEYS, v.p + from / KU * v.ld, v.ld, f->o, padded(d));
}

static int few_piece(const struct fa_call *call, const struct fa_sequence *seq, int64_t kv_head,
                     const struct forward_space *w) {
    const struct hal_flash_attention *g = call->shape;
    if (seq->sq < 1 || seq->sq > FA_FEW || g->dropout_threshold) return 0;
    const int64_t d = g->head_size, ldq = padded(units(d)), group = g->heads / g->kv_heads;
    const int64_t sweep = call->mask && g->mask[1] ? 1 : FA_QUERIES / seq->sq;  // heads
    const char *ks = rows_of(call->k, g->k, g->dtype, seq->batch, seq->k0, kv_head);
    const char *vs = rows_of(call->v, g->v, g->dtype, seq->batch, seq->k0, kv_head);
    struct few f = {.q = w->rows, .s = w->s, .o = w->o};
    int64_t first, end;
    fa_visible(seq, 0, seq->sq, &first, &end);
    if (first < seq->lo) first = seq->lo;  // it was made even
    for (f.head = kv_head * group; f.head < (kv_head + 1) * group; f.head += sweep) {
        const int64_t left = (kv_head + 1) * group - f.head, heads = left < sweep ? left : sweep;
        f.rows = (int)(heads * seq->sq);
        for (int r = 0; r < f.rows; r++) f.m[r] = -(real)INFINITY, f.l[r] = splat(0);
        for (int64_t h = 0; h < heads; h++)
            pack_rows(f.q + h * seq->sq * ldq, ldq, rows_of(call->q, g->q, g->dtype, seq->batch, seq->q0, f.head + h),
                      g->q[1] * element_size(g->dtype), g->dtype, seq->sq, d);
        memset(f.o, 0, (size_t)(f.rows * padded(d)) * sizeof(real));
        for (f.k0 = first; f.k0 < end; f.k0 += FA_KEYS) {
            f.keys = (int)(end - f.k0 < FA_KEYS ? end - f.k0 : FA_KEYS);
            few_keys(&f, call, seq, ks, vs, w);
        }
        for (int64_t h = 0; h < heads; h++) {
            struct forward_state q = {.t = {.rows = (int)seq->sq, .seen = {1, 1, 1}}};
            q.o = f.o + h * seq->sq * padded(d);
            for (int64_t i = 0, r = h * seq->sq; i < seq->sq; i++, r++) {
                q.m[i] = f.m[r];
                for (int l = 0; l < W; l++) q.l[i] += f.l[r][l];
            }
            forward_close(call, seq, f.head + h, &q);
        }
    }
    return 1;
}
